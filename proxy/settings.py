"""One tree of settings: file < environment < flags.

Every setting has a name that is the same everywhere: `body_limit_bytes` in the file,
`TOKENPROXY_BODY_LIMIT_BYTES` in the environment, `--body-limit-bytes` on the command line.
"""

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
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return f"sqlite:///{Path(state) / 'tokenproxy' / 'rollouts.db'}"


class SettingsError(Exception):
    """A setting is missing or wrong; the message names it and says what it should be."""


class Settings(BaseSettings):
    """Settings of the proxy; inside vLLM those apply that concern no socket of its own."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", env_ignore_empty=True)

    upstreams: Annotated[list[str], NoDecode] = Field(
        default=[], description="base URLs of vLLM servers, with or without /v1"
    )
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8100, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    api_key: SecretStr | None = Field(default=None, description="key that clients must send as Bearer token")
    upstream_api_key: SecretStr | None = Field(
        default=None, description="key for the engines (their --api-key); the proxy's own questions need it"
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
        description="where turns are recorded: sqlite:///FILE, redis://HOST:PORT/DB or memory:",
    )
    store_max_bytes: int = Field(default=2**30, ge=1, description="bytes of turns kept; the oldest used go")
    store_max_age_s: float = Field(
        default=7 * 86_400.0, gt=0, description="seconds after its last use that a rollout is kept"
    )
    record_logprobs: bool = Field(
        default=True, description="ask engines for log-probabilities, whatever clients want, to record them"
    )
    connect_timeout_s: float = Field(default=5.0, gt=0, description="seconds to wait for a connection")
    watch_interval_s: float = Field(default=5.0, gt=0, description="seconds between health checks")
    encoder_threads: int = Field(default=2, ge=1, description="threads that tokenise")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="log level")

    @field_validator("upstreams", mode="before")
    @classmethod
    def _split(cls, urls: object) -> object:
        """The environment holds them with commas between."""
        return [url.strip() for url in urls.split(",") if url.strip()] if isinstance(urls, str) else urls

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


def load_settings(file: Path | None = None, **flags: Any) -> Settings:
    """Settings from a YAML file, the environment and flags that were given.

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
