"""Arguments that state what the tool's schema has as default."""

from typing import Any

import pytest

from chat_tokenizer import canonical, chain
from chat_tokenizer.equivalences import equivalents

_SCHEMA = {
    "path": {"type": "string"},
    "all": {"type": "boolean", "default": False},
    "options": {"default": {"a": 1, "b": [2]}},
}
_TOOLS = [{"type": "function", "function": {"name": "edit", "parameters": {"properties": _SCHEMA}}}]


def _turn(arguments: str, name: str = "edit") -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def test_a_stated_default_of_the_called_tool_is_ignored() -> None:
    defaults = equivalents(_TOOLS)
    stated = '{"path": "a", "options": {"a": 1, "b": [2.0]}, "all": false}'
    sampled, sent = (canonical(_turn(text), 0, defaults) for text in ('{"path": "a"}', stated))
    assert sent.loose == sampled.loose == sampled.strict != sent.strict
    assert canonical(_turn(stated)).loose != sampled.loose
    for name, equal in (("edit", True), ("other", False)):
        chains = [
            chain([_turn(text, name)], tools=_TOOLS, template_kwargs=None, loose=True)
            for text in ('{"path": "a"}', stated)
        ]
        assert (chains[0] == chains[1]) is equal


@pytest.mark.parametrize(
    "edited", ['"all": 0}', '"other": false}', '"options": {"a": 1}}', '"all": false'], ids=range(4)
)
def test_every_other_argument_counts(edited: str) -> None:
    defaults = equivalents(_TOOLS)
    sampled, sent = (canonical(_turn('{"path": "a"' + end), 0, defaults) for end in ("}", ", " + edited))
    assert sent.loose != sampled.loose


def test_odd_tools_have_no_defaults() -> None:
    schema = {"properties": {"all": True}}
    odd: list[Any] = [{"function": None}, {"function": {"name": "edit", "parameters": schema}}]
    assert equivalents(odd).digest == b"" != equivalents(_TOOLS).digest
