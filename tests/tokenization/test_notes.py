"""What an append says about the turn that the template would have rendered otherwise."""

from typing import Any

import pytest

from tests.templates.families import template_files
from tokenization import ChatTokenizer
from tokenization.check import load_for_check

_ASKED = {"role": "user", "content": "Weather?"}
_NEXT = [{"role": "user", "content": "And then?"}]


def _calling(arguments: str) -> dict[str, Any]:
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
        (_calling('{"city": "Paris"}'), ()),
        (_calling('{"city":   "Paris"}'), ("arguments_rewritten",)),
    ],
)
def test_notes(qwen: ChatTokenizer, turn: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert qwen.append([5], _NEXT, history=[_ASKED, turn]).notes == expected


def test_a_stop_token_that_the_template_rewrites() -> None:
    gptoss = load_for_check(str(template_files()["gptoss"]))
    returned = gptoss.encode("<|return|>")
    out = gptoss.append(returned, _NEXT, history=[_ASKED, {"role": "assistant", "content": "Sun."}])
    assert out.notes == ("turn_end_rewritten",)
    assert out.close_ids == []
