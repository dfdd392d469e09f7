"""One tree of settings: a file, overridden by the environment, overridden by flags.

Every setting has a name that is the same everywhere: `body_limit_bytes` in the file,
`TOKENPROXY_BODY_LIMIT_BYTES` in the environment, `--body-limit-bytes` on the command line.
"""

import os
import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from proxy.engine.http import url_credentials
from proxy.routes.auth import is_loopback
from proxy.settings.groups import EngineSettings, PromptSettings, RecordingSettings, ServerSettings

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


class SettingsError(Exception):
    """A setting is missing or wrong; the message names it and the valid values."""


# Pydantic lists the fields of the last base first
class Settings(RecordingSettings, PromptSettings, ServerSettings, EngineSettings):
    """Settings of the proxy. docs/settings.md lists them and those that apply inside vLLM."""

    model_config = ConfigDict(extra="forbid")


def lends_credentials(settings: Settings) -> bool:
    """Whether the proxy adds its own credentials to the requests that it sends to engines for clients."""
    return settings.upstream_api_key is not None or any(map(url_credentials, settings.upstreams))


def refuse_open_proxy(settings: Settings) -> None:
    """Refuse settings with which every client that reaches the proxy could use the engine's key.

    Raises:
        SettingsError: there is an `upstream_api_key` or a user in an upstream's URL, clients need no key, and
            `host` is not a loopback address.
    """
    lends = lends_credentials(settings) and not settings.asks_for_keys
    if lends and not settings.allow_anonymous and not is_loopback(settings.host):
        name = "`upstream_api_key`" if settings.upstream_api_key else "the user in an upstream's URL"
        raise SettingsError(
            f"every client that reaches host {settings.host} could use the engines with {name}: "
            "set `api_key` (--api-key KEY), listen on 127.0.0.1, or pass --allow-anonymous"
        )


def refuse_split_memory(settings: Settings) -> None:
    """Refuse several workers whose turns would be kept in the memory of each.

    Raises:
        SettingsError: there are `workers`, and the store is `memory:`.
    """
    if settings.workers > 1 and settings.store == "memory:":
        raise SettingsError(
            f"{settings.workers} `workers` cannot share turns that `store: memory:` keeps in each process: "
            "set `store` to sqlite:///FILE or redis://HOST:PORT/DB, or pass --workers 1"
        )


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
        problem = "there is no such setting" if first["type"] == "extra_forbidden" else first["msg"]
        raise SettingsError(f"{name}: {problem}") from error


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
            raise SettingsError(f"{variable}: there is no such setting; docs/settings.md lists them")
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
