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


def _turn(arguments: str, name: str = "edit") -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def test_a_stated_default_is_ignored() -> None:
    defaults, stated = (
        argument_defaults(_TOOLS),
        '{"path": "a", "options": {"a": 1, "b": [2.0]}, "all": false}',
    )
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
    odd: list[Any] = [
        {"function": None},
        {"function": {"name": "edit", "parameters": {"properties": {"all": True}}}},
    ]
    assert argument_defaults(odd).digest == b"" != defaults.digest
