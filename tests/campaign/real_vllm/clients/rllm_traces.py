"""Calls rLLM's `GatewayClient`, unmodified, with the Python of its own environment.

python rllm_traces.py URL SESSION create    creates the session; prints its base URL
python rllm_traces.py URL SESSION traces    prints its traces, then deletes it
"""

import json
import sys

from rllm_model_gateway.client import GatewayClient  # type: ignore[import-not-found]


def main(url: str, session: str, action: str) -> object:
    """What the client returns."""
    with GatewayClient(url) as client:
        if action == "create":
            assert client.create_session(session, metadata={"task": 7}) == session
            assert client.get_session_info(session)["metadata"] == {"task": 7}
            return client.get_session_url(session)
        traces = client.get_session_traces(session)
        assert client.get_session_traces(session, limit=1) == traces[:1]
        assert client.delete_session(session)
        return [trace.model_dump() for trace in traces]


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
