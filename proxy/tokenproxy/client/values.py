"""What a client takes and returns."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypedDict

import msgspec


class SessionFields(TypedDict, total=False):
    """What `create_session` sets. Fields that are left out, or None, stay as they are."""

    defaults: Mapping[str, Any] | None
    """Fields of a chat request that apply where a request does not set them."""
    overrides: Mapping[str, Any] | None
    """Fields of a chat request that replace those of a request."""
    metadata: Mapping[str, Any] | None
    limits: Mapping[str, float] | None
    """`turns`, `sampled_ids` and `seconds` after which the proxy ends the session's program."""
    policy: Mapping[str, Any] | None
    """Sampling parameters of all turns; with the `mode` `note` turns with others are only noted."""
    key_expires_s: float | None
    """Seconds until `SessionInfo.key` expires; a day if left out."""
    exists: Literal["continue", "error"] | None
    """What happens if the session exists: `continue` (the default) changes its description."""


class SampleSelection(TypedDict, total=False):
    """Which turns the samples train, and in which form."""

    classes: Iterable[str]
    """Of the turns to train on; all turns if left out or empty."""
    on_policy: bool
    """Whether to train only on turns that were sampled by their session's policy."""
    layout: str
    """Of the samples; `plain` if left out."""
    shared: str
    """Whether turns that samples share are trained `once` or in `each`; `once` if left out."""


class FeedSelection(SampleSelection, total=False):
    """Which rollouts and samples are read from the feed."""

    limit: int
    """Of rollouts in one response; 16 if left out."""
    metadata: Mapping[str, str] | None
    """Values that the session's metadata must have."""
    weight_versions: Iterable[str]
    """Samples whose turns were all sampled by these weights; all samples if left out or empty."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A model that the engines serve."""

    id: str
    """The name with which requests select it."""
    parent: str | None = None
    """The base model of an adapter."""
    max_model_len: int | None = None
    """The most ids of prompt and completion together; None if the engine does not report it."""


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A session, with the tree of its turns if it was read alone."""

    id: str
    explicit: bool
    """Whether a client named it; False for a conversation without a session."""
    ambiguous: bool
    """Whether another rollout held an equal conversation, so that requests may have been confused."""
    created: float
    """Seconds since the epoch, as `used`."""
    used: float
    turn_count: int
    bytes: int
    """That its turns and its description take in the store."""
    defaults: dict[str, Any]
    """Fields of a chat request that apply where a request does not set them."""
    overrides: dict[str, Any]
    """Fields of a chat request that replace those of a request."""
    metadata: dict[str, Any]
    limits: dict[str, float | None] = {}
    policy: dict[str, Any] = {}
    sampled_ids: int = 0
    """In all its turns."""
    reward: float | None = None
    """Of the whole rollout."""
    refusals: int = 0
    """How many of its requests were refused, each within a day of the one before."""
    last_refusal: str = ""
    """Status and message of the last of them."""
    agents: list[dict[str, Any]] = []
    """As `GET /v1/sessions/{session}` returns them."""
    turns: list[dict[str, Any]] = []
    """As `GET /v1/sessions/{session}` returns them."""
    key: str | None = None
    """Of `create_session` where the proxy has keys: it takes turns of this session, and does nothing else."""


class SessionSampleList(msgspec.Struct, frozen=True, kw_only=True):
    """The training samples of one session."""

    samples: list[dict[str, Any]]
    """In the fields of the requested layout."""
    refused: list[dict[str, Any]]
    """The leaves that gave no sample, each with its `reason`."""


class FeedRollout(msgspec.Struct, frozen=True, kw_only=True):
    """A finished rollout."""

    rollout: str
    """The name of its session."""
    revision: int
    """1, and one more each time it is delivered again after a change."""
    cause: str
    """`reward`, `end` or `idle`."""
    finished: float
    """Seconds since the epoch."""
    metadata: dict[str, Any]
    samples: list[dict[str, Any]]
    """In the fields of the requested layout."""
    refused: list[dict[str, Any]]
    """The leaves that gave no sample, each with its `reason`."""
    cursor: str
    """Acknowledges this rollout and all before it."""


class FeedPage(msgspec.Struct, frozen=True, kw_only=True):
    """Finished rollouts, in the order of finishing."""

    data: list[FeedRollout]
    cursor: str
    """Where to read on; it may be after the last rollout of `data` if a filter left out others."""
    more: bool
    """Whether more rollouts are finished after `cursor`."""


class FeedConsumer(msgspec.Struct, frozen=True, kw_only=True):
    """How far a consumer has read."""

    consumer: str
    cursor: str
    """The last one that it acknowledged."""
    waiting: int
    """Finished rollouts after that."""
    oldest: float | None
    """When the first of these was finished, in seconds since the epoch; None if there is none."""


class TokenTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of the token route: p ids of prompt, c sampled ids."""

    prompt_ids: list[int]
    """The exact prompt; [p]."""
    completion_ids: list[int]
    """The sampled ids; [c]."""
    logprobs: list[float] | None
    """The log-probability (natural logarithm) of each sampled id, [c]; None if they were not requested."""
    message: dict[str, Any]
    """What the engine parsed from them: text, reasoning, tool calls."""
    finish_reason: str | None
    session: str | None
    """The rollout that the turn was recorded in; None if it was not recorded."""
    turn: str | None
    """Its id, for rewards."""

    @property
    def ids(self) -> list[int]:
        """Prompt and completion: the `prompt_ids` of the next turn, before its new messages; [p + c]."""
        return self.prompt_ids + self.completion_ids
