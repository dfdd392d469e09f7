"""Settings of the server: its address, its API keys, and the limits of what it accepts."""

import re
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode

from proxy.routes.key_file import read_keys
from proxy.settings.flags import Flag
from proxy.settings.lists import split

_HOST = re.compile(r"(\*\.)?[A-Za-z0-9._-]+|[0-9A-Fa-f:]+")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")


class ServerSettings(BaseModel):
    """The address of the proxy, its API keys, and the limits of what it accepts."""

    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8100, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    workers: int = Field(
        default=1,
        ge=1,
        description="processes that serve the port; more than 1 need SQLite or Redis as `store`",
    )
    api_key: Annotated[list[SecretStr], NoDecode, Flag("KEY")] = Field(
        default=[],
        description="API keys; clients must send one; each is a tenant that sees only its own recordings",
    )
    admin_key: Annotated[list[SecretStr], NoDecode, Flag("KEY")] = Field(
        default=[], description="keys with all scopes, for the engines' admin routes too"
    )
    api_key_file: Annotated[Path | None, Flag("FILE")] = Field(
        default=None,
        description="file of named keys with scopes, from `tokenproxy key`; read again when it changes",
    )
    metrics_need_key: bool = Field(
        default=False, description="require a key with the scope `read` for /metrics too"
    )
    allow_anonymous: bool = Field(
        default=False,
        description="lend `upstream_api_key` to clients without a key on any `host`, not on loopback only",
    )
    allowed_hosts: Annotated[list[str], NoDecode, Flag("HOST")] = Field(
        default=[], description="names under which clients reach the proxy; others in Host headers get a 400"
    )
    cors_origins: Annotated[list[str], NoDecode, Flag("ORIGIN")] = Field(
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

    @property
    def asks_for_keys(self) -> bool:
        """Whether clients must send one of the proxy's own keys."""
        return bool(self.api_key or self.admin_key or self.api_key_file)

    _split_lists = field_validator("api_key", "admin_key", "allowed_hosts", "cors_origins", mode="before")(
        split
    )

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

    @field_validator("api_key_file", mode="after")
    @classmethod
    def _holds_keys(cls, file: Path | None) -> Path | None:
        if file is not None:
            read_keys(file)
        return file

    @field_validator("tls_cert", "tls_key", mode="after")
    @classmethod
    def _tls_file_exists(cls, file: Path | None) -> Path | None:
        if file is not None and not file.is_file():
            raise ValueError(f"no file at {file}")
        return file

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
