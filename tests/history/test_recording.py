import json
from typing import Any

import pytest

from proxy.history.conversation import Asked, Digester, Setting
from proxy.history.evidence import Outcome, Sampled
from proxy.history.known import make_known
from proxy.history.plan import Plan
from proxy.history.recording import recorded
from proxy.history.turn import turn_id, unpack_ids, unpack_logprobs
from tests.samples.trees import root

_MESSAGES = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "from 1", "reasoning": "so"},
    {"role": "user", "content": "more"},
]
_TOOLS = b'[{"type":"function","function":{"name":"f"}}]'


def _plan(**more: Any) -> Plan:
    asked = Asked(json.dumps(_MESSAGES).encode(), Setting(tools=_TOOLS), "m", "s")
    return Plan(asked, Digester().read(asked, "m"), "m", "s", **more)


def _extending() -> Plan:
    """A plan that goes on behind ids 5, 6, 7."""
    parent = make_known(root("1", [5, 6], [7]), None, b"[5,6]", [7])
    return _plan(source="extended", prompt=b"[5,6,7,8]", parent=parent, added=[8], end=1)


def _sampled(index: int = 0, **fields: Any) -> Sampled:
    given = {"ids": [9, 2], "logprobs": [-0.5, -0.25], "finish_reason": "stop"}
    return Sampled(index, {"role": "assistant", "content": "x"}, **{**given, **fields})


def test_an_extension_is_recorded_as_what_came_behind() -> None:
    (one,) = recorded(_extending(), Outcome(b"[5, 6, 7, 8]", [_sampled()], 2))
    turn = one.turn
    assert (turn.parent, turn.prompt_tokens, turn.problem) == ("1", 4, "")
    assert (unpack_ids(turn.appended), unpack_ids(turn.completion)) == ([8], [9, 2])
    assert unpack_logprobs(turn.logprobs) == [-0.5, -0.25]
    assert json.loads(turn.messages) == _MESSAGES[2:]
    assert (turn.tools, len(turn.reasonings)) == (b"", 1)


@pytest.mark.parametrize("prompt", [b"[5,6,7]", b"[1,5,6,7,8]", b"[5,6,7,9]"])
def test_what_the_engine_did_counts(prompt: bytes) -> None:
    """It was given ids, and used others: its prompt is no extension of anything."""
    (one,) = recorded(_extending(), Outcome(prompt, [_sampled()], 2))
    turn = one.turn
    assert (turn.parent, turn.problem, turn.tools) == (None, "prompt_mismatch", _TOOLS)
    assert unpack_ids(turn.appended) == json.loads(prompt)
    assert turn.prompt_tokens == len(json.loads(prompt))
    assert json.loads(turn.messages) == _MESSAGES
    assert len(turn.reasonings) == 2


def test_a_rendered_prompt_is_recorded_as_it_was_echoed() -> None:
    (one,) = recorded(_plan(), Outcome(b"[1, 2,\n3]", [_sampled()], 2))
    assert (unpack_ids(one.turn.appended), one.turn.prompt_tokens, one.turn.parent) == ([1, 2, 3], 3, None)


def test_each_choice_is_a_turn() -> None:
    outcome = Outcome(b"[1]", [_sampled(0), _sampled(1, ids=[4], logprobs=[0.0]), _sampled(2)], 5)
    plan = _plan()
    made = recorded(plan, outcome)
    assert [one.turn.choice for one in made] == [0, 1, 2]
    assert [one.turn.id for one in made] == [turn_id(plan.request, n) for n in range(3)]
    assert [one.turn.id for one in made] == sorted(one.turn.id for one in made)
    assert {one.turn.request for one in made} == {plan.request}


@pytest.mark.parametrize(
    "fields, made",
    [
        ({"ids": None, "finish_reason": None}, 0),
        ({"ids": [], "finish_reason": "abort"}, 0),
        ({"ids": [], "finish_reason": None}, 0),
        ({"ids": [], "finish_reason": "stop"}, 1),
        ({"ids": None, "finish_reason": "stop"}, 1),
        ({"ids": [3], "finish_reason": "abort"}, 1),
        ({"ids": [3], "finish_reason": None}, 1),
    ],
)
def test_choices_of_which_nothing_was_sampled(fields: dict[str, Any], made: int) -> None:
    outcome = Outcome(b"[1]", [_sampled(0, **fields), _sampled(1)])
    assert len(recorded(_plan(), outcome)) == made + 1


@pytest.mark.parametrize("message", [{}, {"role": "assistant", "content": 5}, {"content": "no role"}])
def test_a_message_that_is_none_is_recorded_and_never_found(message: dict[str, Any]) -> None:
    sampled = _sampled()
    sampled.message = message
    (one,) = recorded(_plan(), Outcome(b"[1]", [sampled], 2))
    (found,) = recorded(_plan(), Outcome(b"[1]", [_sampled()], 2))
    assert json.loads(one.turn.message) == message
    assert len(one.keys) < len(found.keys)
