"""Every setting, by topic, with its default, its check and its description."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self, get_origin

from pydantic import BaseModel, Field, SecretStr, ValidationInfo, field_validator, model_validator

from tokenproxy.base.request import EchoPolicy, ResumePolicy, ThinkingPolicy
from tokenproxy.base.urls import PORT, normalise_upstream, read_upstreams

_HOST = re.compile(r"(\*\.)?[A-Za-z0-9._-]+|[0-9A-Fa-f:]+")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")


@dataclass(frozen=True, slots=True)
class Flag:
    """How the help of the command shows a setting, if its name and type do not determine that."""

    metavar: str | None = None
    name: str | None = None
    """The flag without its dashes, if it differs from the name of the setting."""
    default: str | None = None
    """The default in words, if it is long or computed."""


def state_folder() -> Path:
    """The user's state folder, as the XDG base directory specification names it."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "tokenproxy"


def proof_folder() -> Path:
    """The folder of the proofs about chat templates, which all processes of this machine share."""
    return state_folder() / "proofs"


def default_store() -> str:
    """A database in the user's state folder, shared by all processes of this machine."""
    return f"sqlite:///{state_folder() / 'rollouts.db'}"


def _existing(file: Path | None) -> Path | None:
    if file is not None and not file.is_file():
        raise ValueError(f"no file at {file}")
    return file


class _Group(BaseModel):
    """Settings of one topic."""

    @field_validator("*", mode="before")
    @classmethod
    def _read_list(cls, value: object, info: ValidationInfo) -> object:
        """A list may be a string with commas or null, and aliases a mapping of names to models."""
        if get_origin(cls.model_fields[info.field_name or ""].annotation) is not list:
            return value
        if isinstance(value, dict) and info.field_name == "model_aliases":
            return [f"{name}={entry}" for name, entry in value.items()]
        if isinstance(value, str):
            return [part.strip() for part in value.split(",") if part.strip()]
        return [] if value is None else value


class EngineSettings(_Group):
    """The addresses of the engines, and how the proxy sends requests to them."""

    upstreams: Annotated[list[str], Flag("URL", name="upstream")] = Field(
        default=[],
        description="base URLs of vLLM servers, with or without /v1; dns+http://NAME:PORT adds one for each "
        "address of NAME",
        repr=False,  # they may hold a password
    )
    upstreams_file: Annotated[Path | None, Flag("FILE")] = Field(
        default=None, description="file with the base URL of a vLLM server in each line, re-read on change"
    )
    upstream_api_key: Annotated[SecretStr | None, Flag("KEY")] = Field(
        default=None, description="key for the engines (their --api-key), sent in place of the clients'"
    )
    model_aliases: Annotated[list[str], Flag("NAME=MODEL", name="model-alias")] = Field(
        default=[],
        description="requests that name a model NAME, which no engine serves, are for MODEL; `*` in NAME "
        "stands for any characters",
    )
    weight_update_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="seconds that a weight, cache, sleep or adapter call may take on a replica",
    )
    cache_salt_by_version: bool = Field(
        default=False,
        description="send the version of the weights as cache_salt with each request that has none, so that "
        "no prefix of older weights is reused",
    )
    resume: ResumePolicy = Field(
        default=ResumePolicy.FAILURES,
        description="which turns go on from the ids sampled so far when their engine breaks off: after "
        "`failures` of engines, `all` (aborts by weight updates too), or `off`",
    )
    watch_interval_s: float = Field(
        default=5.0,
        gt=0,
        description="seconds between health checks, and between two looks at upstreams_file, DNS and what "
        "other processes changed",
    )
    replica_requests: int = Field(
        default=2048, ge=0, description="requests that may run on one replica at once; 0 for no limit"
    )
    admission_wait_s: float = Field(
        default=120.0,
        ge=0,
        description="seconds that a conversation may wait, all its turns together, until its ids fit into "
        "the KV cache of a replica; 0 lets none wait",
    )

    @field_validator("upstreams", mode="after")
    @classmethod
    def _normalise(cls, urls: list[str]) -> list[str]:
        return [normalise_upstream(url) for url in urls]

    @field_validator("upstreams_file", mode="after")
    @classmethod
    def _is_a_list(cls, file: Path | None) -> Path | None:
        if file is not None:
            read_upstreams(file)
        return file


class ServerSettings(_Group):
    """The address of the proxy, its API keys, what it accepts, how it stops, and its log."""

    host: str = Field(
        default="127.0.0.1",
        description="address to listen on; `::` for all of IPv6 and IPv4, `0.0.0.0` for all of IPv4",
    )
    port: int = Field(default=PORT, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    workers: int = Field(
        default=1,
        ge=1,
        description="processes that serve the port; more than 1 need SQLite or Redis as `store`",
    )
    api_key: Annotated[list[SecretStr], Flag("KEY")] = Field(
        default=[],
        description="API keys; clients must send one; each is a tenant that sees only its own recordings",
    )
    admin_key: Annotated[list[SecretStr], Flag("KEY")] = Field(
        default=[], description="keys with all scopes, for the engines' admin routes too"
    )
    api_key_file: Annotated[Path | None, Flag("FILE")] = Field(
        default=None,
        description="file of named keys with scopes, from `tokenproxy key`; read again when it changes",
    )
    metrics_need_key: bool = Field(
        default=False, description="require a key with the scope `read` for /metrics too"
    )
    allowed_hosts: Annotated[list[str], Flag("HOST")] = Field(
        default=[], description="names under which clients reach the proxy; others in Host headers get a 400"
    )
    cors_origins: Annotated[list[str], Flag("ORIGIN")] = Field(
        default=[], description="origins of web pages that may call the proxy from a browser, or *"
    )
    tls_cert: Annotated[Path | None, Flag("FILE")] = Field(
        default=None, description="PEM file with the certificate and its chain, to serve HTTPS"
    )
    tls_key: Annotated[Path | None, Flag("FILE")] = Field(
        default=None, description="PEM file with the private key of `tls_cert`"
    )
    body_limit_bytes: Annotated[int, Flag(default="64 MiB")] = Field(
        default=64 * 2**20, ge=1, description="largest request body"
    )
    stop_delay_s: float = Field(
        default=0.0,
        ge=0,
        description="seconds after SIGTERM in which new requests are still served while /ready answers 503",
    )
    drain_s: float = Field(
        default=30.0, ge=0, description="seconds that running requests may take to end after that"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info",
        description="log level; debug logs a line for each request",
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="log lines as text, or as one JSON object each"
    )

    @property
    def asks_for_keys(self) -> bool:
        """Whether clients must send one of the proxy's own keys."""
        return bool(self.api_key or self.admin_key or self.api_key_file)

    @field_validator("allowed_hosts", mode="after")
    @classmethod
    def _hosts_are_names(cls, hosts: list[str]) -> list[str]:
        for host in hosts:
            if not _HOST.fullmatch(host):
                raise ValueError(
                    f"{host!r} is not a host name: write it without scheme and port, as a.example.com"
                )
        return hosts

    @field_validator("cors_origins", mode="after")
    @classmethod
    def _origins_are_origins(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is not an origin: write it as https://app.example.com:8443, or *"
                )
        return origins

    _files_exist = field_validator("api_key_file", "tls_cert", "tls_key", mode="after")(_existing)

    @model_validator(mode="after")
    def _tls_is_complete(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("`tls_cert` and `tls_key` belong together: set both, or none of them")
        return self

    @field_validator("api_key", "admin_key", mode="after")
    @classmethod
    def _no_empty_key(cls, keys: list[SecretStr]) -> list[SecretStr]:
        if not all(key.get_secret_value().strip() for key in keys):
            raise ValueError("a key must not be empty")
        return keys


class PromptSettings(_Group):
    """How messages become ids."""

    tokenizer: Annotated[str | None, Flag("NAME", default="the engines' model")] = Field(
        default=None, description="folder or hub name of the tokenizer"
    )
    chat_template: Annotated[Path | None, Flag("FILE")] = Field(
        default=None, description="Jinja file; needed if the engine runs with --chat-template"
    )
    trust_remote_code: bool = Field(
        default=False, description="run Python code from the tokenizer's repository"
    )
    thinking_policy: ThinkingPolicy = Field(
        default=ThinkingPolicy.KEEP,
        description="`keep` leaves the sampled thinking of earlier turns in prompts, `template` renders a "
        "prompt anew where the chat template leaves some of it out; requests and sessions may set it too",
    )
    echo_policy: EchoPolicy = Field(
        default=EchoPolicy.LENIENT,
        description="`lenient` recognises a turn of which a client renamed the ids of calls, rounded "
        "integers or dropped the text next to calls, if only that turn can be meant; `exact` renders the "
        "prompt anew; requests and sessions may set it too",
    )
    overflow: Literal["error", "render"] = Field(
        default="error",
        description="what happens to a conversation whose ids outgrow the model's context: an error, or the "
        "chat template renders it anew, which may drop thinking and starts a new branch",
    )
    image_hosts: Annotated[list[str], Flag("HOST")] = Field(
        default=[], description="hosts from which images are loaded by their URL; by default from none"
    )

    _template_exists = field_validator("chat_template", mode="after")(_existing)


class RecordingSettings(BaseModel):
    """The record of turns and its store."""

    store: Annotated[str, Flag("URL", default="sqlite:///~/.local/state/tokenproxy/rollouts.db")] = Field(
        default_factory=default_store,
        description="database of recorded turns: sqlite:///FILE, redis://HOST:PORT/DB or memory:",
    )
    store_required: bool = Field(
        default=False,
        description="do not start while the store does not respond, instead of serving without it",
    )
    store_timeout_s: float = Field(
        default=1.0, gt=0, description="seconds that a request waits for the store, all its calls together"
    )
    store_max_bytes: Annotated[int, Flag(default="1 GiB")] = Field(
        default=2**30,
        ge=1,
        description="bytes of recorded turns; beyond them the least recently used sessions are evicted",
    )
    store_max_age_s: Annotated[float, Flag(default="7 days")] = Field(
        default=7 * 86_400.0, gt=0, description="seconds after its last use until a session is evicted"
    )
    session_from_key: bool = Field(
        default=False,
        description="a client's API key names its session, for clients that can set nothing else; only keys "
        "that neither proxy nor engine checks",
    )
    finish_after_s: Annotated[float, Flag(default="1 hour")] = Field(
        default=3600.0,
        ge=0,
        description="seconds after its last use until /v1/samples has a session as finished; 0 for never",
    )
    processed_logprobs_required: bool = Field(
        default=False,
        description="turns whose log-probabilities leave out the temperature or other sampling parameters, "
        "or may, give no samples; those of vLLM with --logprobs-mode processed_logprobs leave out none",
    )
    cache_bytes: Annotated[
        int | None, Flag(default="an eighth of the machine's memory, shared by the workers; at most 1 GiB")
    ] = Field(
        default=None,
        ge=0,
        description="memory of each process for recently used conversations and their ids",
    )
