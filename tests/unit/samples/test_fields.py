"""No field of a recorded turn is left out of sessions or exports by oversight."""

from tests.support.trees import root
from tokenproxy.record.turn import Turn
from tokenproxy.samples.chains import Link
from tokenproxy.samples.samples import TurnSpan
from tokenproxy.samples.turn_json import turn_fields

_OF_THE_STORE = {
    *("rollout", "prompt_turn", "scope", "spelling_before", "spelling", "reasonings", "calls", "ids_digest"),
    "replica",
}
"""What only the proxy itself reads."""
_OF_THE_SAMPLE = {"tools", "template_kwargs", "images", "messages", "message", "model", "problem"}
"""What an export says once for all turns of a sample; a turn with a problem is in none."""
_IN_OTHER_WORDS = {"appended", "completion", "alternatives", "logprobs", "prompt_tokens", "completion_tokens"}
"""Ids and log-probabilities: a session has their numbers, a sample holds them joined."""
_ONLY_OF_SPANS = {
    *("logprobs_mode", "logprobs_without", "weight_versions", "weights_uncertain"),
    *("routed_experts", "routed_experts_start", "sampling_mask", "segments", "began_anew"),
}
_ONLY_OF_SESSIONS = {"parent", "request", "choice", "created", "cached_tokens"}


def test_every_field_of_a_turn_is_shown_in_sessions() -> None:
    unseen = {*Turn.__struct_fields__} - turn_fields(root("t", [1], [2]), "", Link()).keys()
    left_out = _OF_THE_STORE | _IN_OTHER_WORDS | _ONLY_OF_SPANS | {"tools", "template_kwargs", "images"}
    assert unseen - left_out == set()


def test_every_field_of_a_turn_is_in_the_spans_of_exports() -> None:
    unseen = {*Turn.__struct_fields__} - {*TurnSpan.__struct_fields__}
    assert unseen - _OF_THE_STORE - _OF_THE_SAMPLE - _IN_OTHER_WORDS - _ONLY_OF_SESSIONS == set()
