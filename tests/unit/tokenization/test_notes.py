"""Notes of `append` on where the template would render the sampled turn differently."""

from typing import Any

import pytest

from tests.support.templates.families import template_files
from tokenization.check import load_for_check


def _turn(arguments: str | None = None, **fields: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    calls = [{"id": "call00000", "type": "function", "function": function}] if arguments else None
    return {"role": "assistant", "content": "Sun.", "tool_calls": calls, **fields}


@pytest.mark.parametrize(
    "turn, expected",
    [
        (_turn(), ()),
        (_turn(reasoning="Let me see."), ("thinking_stripped",)),
        (_turn('{"city":   "Paris"}', content=""), ("arguments_rewritten",)),
    ],
)
def test_notes(turn: dict[str, Any], expected: tuple[str, ...]) -> None:
    tokenizer, question = load_for_check(str(template_files()["qwen3"])), {"role": "user", "content": "Sun?"}
    assert tokenizer.append([5], [question], history=[question, turn]).notes == expected
