"""The defaults that tools declare for their arguments. Some clients write them into calls they return.

Claude Code sends `{"path": "a", "replace_all": false}` back where the model sampled `{"path": "a"}` and the
schema of the tool declares `"default": false`. A call that states a default equals the call without it.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ArgumentDefaults:
    """The declared defaults of some tools."""

    texts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """For each function the properties with a default, as JSON with sorted keys."""

    @property
    def digest(self) -> bytes:
        """16 bytes; empty if there are no defaults."""
        text = _text(self.texts).encode() if self.texts else b""
        return hashlib.blake2b(text, digest_size=16, person=b"defaults").digest() if text else b""

    def drop(self, function: object, arguments: object) -> object:
        """The arguments of a call without those that equal a default; `arguments` itself if none does."""
        texts = self.texts.get(function) if isinstance(function, str) else None
        if not texts or not isinstance(arguments, dict):
            return arguments
        stated = {name for name in texts.keys() & arguments.keys() if _text(arguments[name]) == texts[name]}
        kept = {name: value for name, value in arguments.items() if name not in stated}
        return kept if len(kept) < len(arguments) else arguments


NO_DEFAULTS = ArgumentDefaults()


def argument_defaults(tools: Iterable[Mapping[str, Any]]) -> ArgumentDefaults:
    """The defaults of the functions in a chat request's tools. Schemas of other shapes declare none."""
    texts: dict[str, dict[str, str]] = {}
    for tool in tools:
        function = _object(tool.get("function"))
        properties = _object(_object(function.get("parameters")).get("properties"))
        defaults = {
            name: _text(schema["default"])
            for name, schema in properties.items()
            if isinstance(schema, Mapping) and "default" in schema
        }
        if defaults and isinstance(function.get("name"), str):
            texts[function["name"]] = defaults
    return ArgumentDefaults(texts)


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: object) -> str:
    """JSON in which 1 and true differ, and 1.0 is 1: see `canonical`."""
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: object) -> object:
    """A JSON value with integers in place of whole floats."""
    if isinstance(value, dict):
        return {name: _whole(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_whole(member) for member in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
