"""Arguments that state what the tool's schema has as default."""

from typing import Any

import pytest

from tokenization import canonical, chain
from tokenization.argument_defaults import argument_defaults

_SCHEMA = {
    "path": {"type": "string"},
    "all": {"type": "boolean", "default": False},
    "options": {"default": {"a": 1, "b": [2]}},
}
_TOOLS = [{"type": "function", "function": {"name": "edit", "parameters": {"properties": _SCHEMA}}}]
_ODD: list[Any] = [
    {},
    {"function": None},
    {"function": {"name": "edit", "parameters": []}},
    {"function": {"name": "edit", "parameters": {"properties": {"all": True}}}},
    {"function": {"name": 1, "parameters": {"properties": _SCHEMA}}},
]


def _turn(arguments: str, name: str = "edit") -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.mark.parametrize(
    "stated", ['{"all": false, "path": "a"}', '{"path": "a", "options": {"a": 1, "b": [2.0]}, "all": false}']
)
def test_a_stated_default_is_ignored(stated: str) -> None:
    defaults = argument_defaults(_TOOLS)
    sampled, sent = (canonical(_turn(text), 0, defaults) for text in ('{"path": "a"}', stated))
    assert sent.loose == sampled.loose == sampled.strict
    assert sent.strict != sampled.strict
    assert canonical(_turn(stated)).loose != sampled.loose
    chains = [
        chain([_turn(text)], tools=_TOOLS, template_kwargs=None, loose=True)
        for text in ('{"path": "a"}', stated)
    ]
    assert chains[0] == chains[1]


@pytest.mark.parametrize(
    "edited",
    [
        '{"path": "b", "all": false}',
        '{"path": "a", "all": true}',
        '{"path": "a", "all": 0}',
        '{"path": "a", "other": false}',
        '{"path": "a", "options": {"a": 1}}',
        '{"path": "a", "all": false',
    ],
)
def test_every_other_argument_counts(edited: str) -> None:
    defaults = argument_defaults(_TOOLS)
    assert canonical(_turn(edited), 0, defaults).loose != canonical(_turn('{"path": "a"}'), 0, defaults).loose


def test_defaults_are_those_of_the_called_tool() -> None:
    defaults = argument_defaults(_TOOLS)
    stated = canonical(_turn('{"all": false}', "other"), 0, defaults)
    assert stated.loose == stated.strict != canonical(_turn("{}", "other"), 0, defaults).loose
    assert argument_defaults(_ODD).texts == {}
    assert argument_defaults(_ODD).digest == b"" != argument_defaults(_TOOLS).digest
