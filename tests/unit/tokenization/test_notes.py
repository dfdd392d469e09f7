"""Notes of `append` on where the template would render the sampled turn differently."""

from typing import Any

import pytest

from tests.support.templates.families import template_files
from tokenization import ChatTokenizer
from tokenization.check import load_for_check

_QUESTION = {"role": "user", "content": "Weather?"}
_NEXT = [{"role": "user", "content": "And then?"}]


def _turn_with_call(arguments: str) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00000", "type": "function", "function": function}],
    }


@pytest.fixture(scope="module")
def qwen() -> ChatTokenizer:
    return load_for_check(str(template_files()["qwen3"]))


@pytest.mark.parametrize(
    "turn, expected",
    [
        ({"role": "assistant", "content": "Sun."}, ()),
        ({"role": "assistant", "content": "Sun.", "reasoning": "Let me see."}, ("thinking_stripped",)),
        ({"role": "assistant", "content": "Sun.", "reasoning_content": "Hm."}, ("thinking_stripped",)),
        (_turn_with_call('{"city": "Paris"}'), ()),
        (_turn_with_call('{"city":   "Paris"}'), ("arguments_rewritten",)),
    ],
)
def test_notes(qwen: ChatTokenizer, turn: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert qwen.append([5], _NEXT, history=[_QUESTION, turn]).notes == expected


def test_replaced_stop_token_is_noted() -> None:
    gptoss = load_for_check(str(template_files()["gptoss"]))
    # the template prints <|end|> in its place when messages follow
    stop_ids = gptoss.encode("<|return|>")
    appended = gptoss.append(stop_ids, _NEXT, history=[_QUESTION, {"role": "assistant", "content": "Sun."}])
    assert appended.notes == ("turn_end_rewritten",)
    assert appended.close_ids == []
