"""Creates the command-line flags of `tokenproxy serve`: one for each setting of the tree."""

import argparse
import types
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo


@dataclass(frozen=True, slots=True)
class Flag:
    """How the help of the command shows a setting, if its name and type do not determine that."""

    metavar: str | None = None
    name: str | None = None
    """The flag without its dashes, if it differs from the name of the setting."""
    default: str | None = None
    """The default in words, if it is long or computed."""


def flag_name(name: str, field: FieldInfo) -> str:
    """The flag of a setting: `--body-limit-bytes` of `body_limit_bytes`."""
    return "--" + (_flag(field).name or name).replace("_", "-")


def add_flags(parser: argparse.ArgumentParser, groups: Mapping[str, type[BaseModel]]) -> None:
    """Add a flag for each setting, under the titles of their groups.

    Values stay text, which the settings convert, so that a wrong value gets the same error message from every
    source.
    """
    for title, model in groups.items():
        group = parser.add_argument_group(title)
        for name, field in model.model_fields.items():
            group.add_argument(flag_name(name, field), dest=name, **_options(field))


def _options(field: FieldInfo) -> dict[str, Any]:
    """The arguments of `add_argument` for a setting."""
    flag, kind = _flag(field), _without_none(field.annotation)
    text = (field.description or "").replace("%", "%%")
    default = flag.default or _shown(field)
    options: dict[str, Any] = {"default": None, "help": f"{text} (default: {default})" if default else text}
    if kind is bool:
        return {**options, "action": "store_true"}  # no switch is on by default
    if get_origin(kind) is list:
        options.update(action="append", help=f"{text}; repeatable")
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return {**options, "choices": get_args(kind)}
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return {**options, "choices": [member.value for member in kind]}
    return {**options, "metavar": flag.metavar or ("N" if kind is int else "S" if kind is float else "VALUE")}


def _flag(field: FieldInfo) -> Flag:
    return next((part for part in field.metadata if isinstance(part, Flag)), Flag())


def _without_none(annotation: Any) -> Any:
    """`int` of `int | None`; any other type as it is."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    return kinds[0] if len(kinds) == 1 else annotation


def _shown(field: FieldInfo) -> str:
    """A default as the help shows it; empty if there is nothing to show."""
    value = field.default
    if field.default_factory is not None or value in (None, False, []):
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)
