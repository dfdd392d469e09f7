"""What clients echo unread, and the turn that it names."""

import base64


def signature(turn_id: str) -> str:
    """The signature of a turn's thinking: the turn's id, base64url-encoded; empty if it is not recorded."""
    return base64.urlsafe_b64encode(turn_id.encode()).decode()
