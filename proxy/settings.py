"""One tree of settings: a file, overridden by the environment, overridden by flags.

Every setting has a name that is the same everywhere: `body_limit_bytes` in the file,
`TOKENPROXY_BODY_LIMIT_BYTES` in the environment, `--body-limit-bytes` on the command line.
"""

import ipaddress
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from proxy.engine.http import normalise_base_url
from proxy.history.store import Limits
from proxy.stores.urls import make_store

ENV_PREFIX = "TOKENPROXY_"


def default_store() -> str:
    """A database in the user's state folder, shared by all processes of this machine."""
    return f"sqlite:///{_state_folder() / 'rollouts.db'}"


def default_proof_folder() -> Path:
    """A folder next to that database."""
    return _state_folder() / "proofs"


def _state_folder() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "tokenproxy"


class SettingsError(Exception):
    """A setting is missing or wrong; the message names it and says what it should be."""


class Settings(BaseSettings):
    """Settings of the proxy. docs/settings.md lists them, and says which apply inside vLLM."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", env_ignore_empty=True)

    upstreams: Annotated[list[str], NoDecode] = Field(
        default=[], description="base URLs of vLLM servers, with or without /v1"
    )
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8100, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    api_key: Annotated[list[SecretStr], NoDecode] = Field(
        default=[],
        description="keys of which clients must send one; each is a tenant that sees only what it recorded",
    )
    upstream_api_key: SecretStr | None = Field(
        default=None, description="key for the engines (their --api-key), sent in place of the clients'"
    )
    allow_anonymous: bool = Field(
        default=False,
        description="lend `upstream_api_key` to clients without a key on any `host`, not on loopback only",
    )
    body_limit_bytes: int = Field(default=64 * 2**20, ge=1, description="largest request body")
    tokenizer: str | None = Field(
        default=None, description="folder or hub name of the tokenizer (default: the engine's model)"
    )
    chat_template: Path | None = Field(
        default=None, description="Jinja file, where the engine runs with --chat-template"
    )
    trust_remote_code: bool = Field(default=False, description="let the tokenizer bring its own code")
    token_in: Literal["auto", "chat", "generate"] = Field(
        default="auto", description="how engines take exact prompts: found out, or forced"
    )
    store: str = Field(
        default_factory=default_store,
        description="database of recorded turns: sqlite:///FILE, redis://HOST:PORT/DB or memory:",
    )
    store_max_bytes: int = Field(
        default=2**30,
        ge=1,
        description="bytes of recorded turns; the sessions used least recently are evicted",
    )
    store_max_age_s: float = Field(
        default=7 * 86_400.0, gt=0, description="seconds after its last use that a session is evicted"
    )
    record_logprobs: bool = Field(
        default=True, description="ask engines for log-probabilities, whatever clients want, to record them"
    )
    record_token_route: bool = Field(
        default=True,
        description="record turns of the token route that have a session or the conversation's messages",
    )
    cache_bytes: int = Field(
        default=256 * 2**20, ge=0, description="memory for recently used conversations and their ids"
    )
    proof_folder: Path = Field(
        default_factory=default_proof_folder,
        description="where it is kept what was proved of chat templates, for all processes",
    )
    audit_share: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="share of appends compared with a rendering of the whole history, and the first of each "
        "kind; 0 for none",
    )
    connect_timeout_s: float = Field(default=5.0, gt=0, description="seconds to wait for a connection")
    watch_interval_s: float = Field(default=5.0, gt=0, description="seconds between health checks")
    encoder_threads: int = Field(default=2, ge=1, description="threads that tokenise")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="log level")

    @field_validator("upstreams", "api_key", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """A string holds several values with commas between them; null is none."""
        if isinstance(value, str):
            return [part.strip() for part in value.split(",") if part.strip()]
        return [] if value is None else value

    @field_validator("api_key", mode="after")
    @classmethod
    def _no_empty_key(cls, keys: list[SecretStr]) -> list[SecretStr]:
        if not all(key.get_secret_value().strip() for key in keys):
            raise ValueError("a key must not be empty")
        return keys

    @field_validator("upstreams", mode="after")
    @classmethod
    def _normalise(cls, urls: list[str]) -> list[str]:
        return [normalise_base_url(url) for url in urls]

    @field_validator("store", mode="after")
    @classmethod
    def _store_exists(cls, url: str) -> str:
        make_store(url, Limits())
        return url

    @field_validator("chat_template", mode="after")
    @classmethod
    def _exists(cls, file: Path | None) -> Path | None:
        if file is not None and not file.is_file():
            raise ValueError(f"no file at {file}")
        return file


def refuse_open_proxy(settings: Settings) -> None:
    """Refuse to lend the engine's key to everybody who can reach the proxy.

    Raises:
        SettingsError: there is an `upstream_api_key`, clients need no key, and `host` is no loopback address.
    """
    lends = settings.upstream_api_key is not None and not settings.api_key
    if lends and not settings.allow_anonymous and not _is_loopback(settings.host):
        raise SettingsError(
            f"whoever reaches host {settings.host} would use the engines with `upstream_api_key`: "
            "set `api_key` (--api-key KEY), listen on 127.0.0.1, or pass --allow-anonymous"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def load_settings(file: Path | None = None, **flags: Any) -> Settings:
    """Settings from a YAML file, the environment and the flags that are not None.

    Raises:
        SettingsError: the file cannot be read, or a setting is wrong.
    """
    in_file = _read(file) if file is not None else {}

    class FileSettings(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            """Flags before environment before file."""
            return init_settings, env_settings, InitSettingsSource(settings_cls, in_file)

    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return FileSettings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or "settings"
        raise SettingsError(f"{name}: {first['msg']}") from error
    except ValueError as error:
        raise SettingsError(str(error)) from error


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
