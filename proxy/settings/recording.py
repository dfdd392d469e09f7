"""Settings of the record of turns and its store."""

from typing import Annotated

from pydantic import BaseModel, Field, field_validator

from proxy.history.store import Limits
from proxy.settings.flags import Flag
from proxy.settings.folders import state_folder
from proxy.stores.urls import make_store


def default_store() -> str:
    """A database in the user's state folder, shared by all processes of this machine."""
    return f"sqlite:///{state_folder() / 'rollouts.db'}"


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
    stored_response_bytes: Annotated[int, Flag(default="256 MiB")] = Field(
        default=256 * 2**20,
        ge=0,
        description="bytes of responses of /v1/responses that are kept for `previous_response_id`; beyond "
        "them the oldest are dropped",
    )
    record_logprobs: bool = Field(
        default=True,
        description="request and record log-probabilities even if the client does not request them",
    )
    record_token_route: bool = Field(
        default=True,
        description="record turns of the token route that have a session or the conversation's messages, and "
        "those of the completions and generate routes",
    )
    viewer: bool = Field(
        default=True, description="serve /viewer, the page that shows the recorded rollouts in a browser"
    )
    session_from_key: bool = Field(
        default=False,
        description="a client's API key names its session, for clients that can set nothing else; only keys "
        "that neither proxy nor engine checks",
    )
    request_class_header: str = Field(
        default="x-claude-code-request-class",
        pattern=r"^[A-Za-z0-9_-]*$",
        description="request header whose value is recorded with each turn as its class; empty for none",
    )
    finish_after_s: Annotated[float, Flag(default="1 hour")] = Field(
        default=3600.0,
        ge=0,
        description="seconds after its last use until /v1/samples has a session as finished; 0 for never",
    )
    cache_bytes: Annotated[int, Flag(default="1 GiB")] = Field(
        default=2**30, ge=0, description="memory for recently used conversations and their ids"
    )

    @field_validator("store", mode="after")
    @classmethod
    def _store_exists(cls, url: str) -> str:
        make_store(url, Limits())
        return url
