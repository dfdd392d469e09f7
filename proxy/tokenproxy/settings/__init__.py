"""The settings of the proxy, one tree: a file, overridden by the environment, overridden by flags.

Every setting has a name that is the same everywhere: `body_limit_bytes` in the file,
`TOKENPROXY_BODY_LIMIT_BYTES` in the environment, `--body-limit-bytes` on the command line.
"""

import argparse
import os
import re
import types
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from tokenproxy.base.errors import UsageError, no_such
from tokenproxy.settings.groups import EngineSettings, Flag, PromptSettings, RecordingSettings, ServerSettings

ENV_PREFIX = "TOKENPROXY_"
_NO_SETTINGS = re.compile("CONFIG|SESSION|URL|(.+_)?(SERVICE_(HOST|PORT.*)|PORT(_.+)?)")
"""Other variables with the prefix: those of the commands, and those that Kubernetes sets for a Service whose
name begins like the prefix."""
GROUPS: dict[str, type[BaseModel]] = {
    "engines": EngineSettings,
    "server": ServerSettings,
    "prompts": PromptSettings,
    "recording": RecordingSettings,
}
"""The settings by topic, in the order of the command's help and of docs/settings.md."""


class SettingsError(UsageError):
    """A setting is missing or wrong; the message names it and the valid values."""


# Pydantic lists the fields of the last base first
class Settings(RecordingSettings, PromptSettings, ServerSettings, EngineSettings):
    """Settings of the proxy. docs/settings.md lists them and those that apply inside vLLM."""

    model_config = ConfigDict(extra="forbid")


def load_settings(file: Path | None = None, **flags: Any) -> Settings:
    """Settings from a YAML file, the environment and the flags that are not None.

    Raises:
        SettingsError: the file cannot be read, or a setting is wrong or unknown.
    """
    given = (_read(file) if file is not None else {}) | _environment()
    given |= {name: value for name, value in flags.items() if value is not None}
    try:
        return Settings.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or "settings"
        if first["type"] == "extra_forbidden":
            place = f" in {file}" if file is not None and name not in flags else ""
            raise SettingsError(
                f"{name}{place}: {no_such('setting', name, Settings.model_fields)}"
            ) from error
        raise SettingsError(f"{name}: {first['msg'].removeprefix('Value error, ')}") from error


def _environment() -> dict[str, str]:
    """The settings in the environment; an empty variable counts as unset. Raises SettingsError."""
    found: dict[str, str] = {}
    for variable, value in os.environ.items():
        name = variable.removeprefix(ENV_PREFIX)
        if not value or name == variable:
            continue
        if name.lower() in Settings.model_fields:
            found[name.lower()] = value
        elif not _NO_SETTINGS.fullmatch(name):
            variables = (f"{ENV_PREFIX}{field.upper()}" for field in Settings.model_fields)
            raise SettingsError(f"{variable}: {no_such('setting', variable, variables)}")
    return found


def _read(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text())
    except FileNotFoundError as error:
        raise SettingsError(f"no settings file at {file}") from error
    except OSError as error:
        raise SettingsError(f"cannot read the settings file {file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file} is not YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"{file} must hold settings as `name: value`")
    return content


# --- flags


def flag_name(name: str, field: FieldInfo) -> str:
    """The flag of a setting: `--body-limit-bytes` of `body_limit_bytes`."""
    return "--" + (_flag(field).name or name).replace("_", "-")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting, under the titles of their groups.

    Values stay text, which the settings convert, so that a wrong value gets the same error message from every
    source.
    """
    for title, model in GROUPS.items():
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
