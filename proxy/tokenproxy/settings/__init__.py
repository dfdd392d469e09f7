"""The settings of the proxy, one tree: a file, overridden by the environment, overridden by flags.

Every setting has a name that is the same everywhere: `body_limit_bytes` in the file,
`TOKENPROXY_BODY_LIMIT_BYTES` in the environment, `--body-limit-bytes` on the command line.
"""

import os
import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from tokenproxy.base.errors import UsageError, no_such
from tokenproxy.settings.groups import EngineSettings, PromptSettings, RecordingSettings, ServerSettings

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
