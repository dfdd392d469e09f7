"""Settings of the engines: their addresses, and how the proxy sends requests to them."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, SecretStr, field_validator
from pydantic_settings import NoDecode

from proxy.fleet.membership import MembershipError, normalise_upstream, read_upstreams
from proxy.settings.flags import Flag
from proxy.settings.lists import split
from proxy.turn.model_aliases import parse_alias


class EngineSettings(BaseModel):
    """The addresses of the engines, and how the proxy sends requests to them."""

    upstreams: Annotated[list[str], NoDecode, Flag("URL", name="upstream")] = Field(
        default=[],
        description="base URLs of vLLM servers, with or without /v1; dns+http://NAME:PORT adds one for each "
        "address of NAME",
        repr=False,  # they may hold a password
    )
    upstreams_file: Annotated[Path | None, Flag("FILE")] = Field(
        default=None, description="file with the base URL of a vLLM server in each line, re-read on change"
    )
    fleet_name: Annotated[str | None, Flag("NAME")] = Field(
        default=None,
        min_length=1,
        description="processes that share a store and this name share what /admin/replicas changed; without "
        "a name, those with the same upstreams and upstreams_file do",
    )
    upstream_api_key: Annotated[SecretStr | None, Flag("KEY")] = Field(
        default=None, description="key for the engines (their --api-key), sent in place of the clients'"
    )
    model_aliases: Annotated[list[str], NoDecode, Flag("NAME=MODEL", name="model-alias")] = Field(
        default=[],
        description="requests that name a model NAME, which no engine serves, are for MODEL; `*` in NAME "
        "stands for any characters",
    )
    token_in: Literal["auto", "chat", "generate"] = Field(
        default="auto", description="how exact prompts are sent to engines: auto tests what each one supports"
    )
    connect_timeout_s: float = Field(default=5.0, gt=0, description="seconds to wait for a connection")
    overload_ratio: Annotated[float, Flag("RATIO")] = Field(
        default=1.5,
        ge=1,
        description="how many times longer than elsewhere a turn must be expected to take before its "
        "conversation leaves the replica that holds it",
    )
    idle_timeout_s: float = Field(
        default=600.0, ge=0, description="seconds that a stream of an engine may pause; 0 for no limit"
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
    watch_interval_s: float = Field(
        default=5.0,
        gt=0,
        description="seconds between health checks, and between two looks at upstreams_file, DNS and what "
        "other processes changed",
    )

    _split_upstreams = field_validator("upstreams", mode="before")(split)

    @field_validator("upstreams", mode="after")
    @classmethod
    def _normalise(cls, urls: list[str]) -> list[str]:
        return [normalise_upstream(url) for url in urls]

    @field_validator("model_aliases", mode="before")
    @classmethod
    def _list_aliases(cls, value: object) -> object:
        if isinstance(value, dict):  # as a file may hold them
            return [f"{name}={model}" for name, model in value.items()]
        return split(value)

    @field_validator("model_aliases", mode="after")
    @classmethod
    def _are_aliases(cls, aliases: list[str]) -> list[str]:
        for alias in aliases:
            parse_alias(alias)
        return aliases

    @field_validator("upstreams_file", mode="after")
    @classmethod
    def _is_a_list(cls, file: Path | None) -> Path | None:
        if file is not None:
            try:
                read_upstreams(file)
            except MembershipError as error:
                raise ValueError(str(error)) from error
        return file
