"""How the prompt of one request is made, and where its turn is recorded: frozen variants."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from chat_tokenizer import ChatTokenizer
from tokenproxy.base.errors import ApiError
from tokenproxy.base.request import ChatRequest
from tokenproxy.record.cache import CachedTurn
from tokenproxy.record.conversation import Conversation
from tokenproxy.record.identity import Scope
from tokenproxy.record.images import ImageModel, LoadedImage
from tokenproxy.record.store import Session
from tokenproxy.record.turn import PromptImage, new_id
from tokenproxy.record.vocabulary import Reason, Source


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of an engine, as planning needs it."""

    name: str
    """Its base model."""
    tokenizer: ChatTokenizer | None
    tokenizer_error: ApiError | None = None
    """Why there is no tokenizer; its code is the reason."""
    refused: Reason | None = None
    """Why the engine takes no prompt ids for this request; None if it does."""
    rendered_fields: frozenset[str] = frozenset()
    """Request fields that its rendering prints, besides messages, tools and template arguments."""
    logprobs_mode: str = ""
    """Its `--logprobs-mode`; empty if unknown."""
    images: ImageModel | None = None
    """How it takes images with exact ids; None if it does not, or not for this request."""
    placeholder: int | None = None
    """The id that stands for an image; None if the engine takes no images with exact ids."""
    max_model_len: int | None = None
    """The most ids of prompt and completion together; None if the engine does not report it."""

    @property
    def no_tokenizer(self) -> Reason | None:
        """The reason to render if there is no tokenizer."""
        if self.tokenizer is not None:
            return None
        code = self.tokenizer_error.code if self.tokenizer_error else None
        return Reason(code) if code in set(Reason) else Reason.NO_TOKENIZER


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the turn of a request is recorded."""

    request: ChatRequest
    session: Session
    """The rollout it belongs to; created when the turn is recorded."""
    scope: Scope
    conversation: Conversation | None
    """The request's messages; None if they could not be read, or if nothing is to be recorded."""
    turn_id: str = field(default_factory=new_id)
    """The turn id of choice 0; see `turn.turn_id`."""
    new_rollout: bool = False
    """Whether this is the first turn of the rollout, under a name that the proxy chose."""
    findable: bool
    """Whether the turn may be found by the text of its conversation."""
    parent: CachedTurn | None = None
    """The turn of the same rollout whose ids the prompt begins with."""
    first_new: int = 0
    """Index of the first message of the request after the parent's conversation."""
    candidates: int = 0
    """Number of recorded turns with the request's text."""
    holder: str = ""
    """Name of the replica that served the turn whose ids the prompt begins with; empty if there is none."""
    held_since: float = 0.0
    """When that turn was requested, in seconds since the epoch; 0 if unknown."""
    claimed: str | None = None
    """A turn that was claimed for this request."""
    logprobs_mode: str = ""
    found_by_ids: bool = False
    """Whether prompts that begin with the turn's ids find it, in any rollout of the scope."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPlan:
    """How the prompt of a request is made."""

    source: ClassVar[Source]
    placement: Placement
    reason: Reason | None = None
    others: tuple["PromptPlan", ...] = ()
    """The plans of the request's other prompts; only a completions request has several."""

    @property
    def prompts(self) -> tuple["PromptPlan", ...]:
        """The plan of each prompt of the request, in the order of the prompts."""
        return (self, *self.others)

    @property
    def rollout(self) -> str | None:
        """The rollout of all prompts; None if they belong to several, or are not recorded."""
        rollout = self.placement.session.id
        if self.placement.conversation is None:
            return None
        if self.others and any(other.placement.session.id != rollout for other in self.others):
            return None
        return rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered(PromptPlan):
    """The engine renders the messages, or tokenises the text."""

    source: ClassVar[Source] = Source.RENDERED
    placeholder: int = 0
    """The id that stands for an image; only if there are `images`."""
    images: Sequence[LoadedImage] | None = None
    """The images of the messages, in their order; None if their ids are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extended(PromptPlan):
    """Exact ids, followed by the template's suffix."""

    source: ClassVar[Source] = Source.EXTENDED
    prompt: bytes
    """The whole prompt as a JSON array."""
    reused: int
    """Number of reused ids."""
    appended: Sequence[int]
    """The ids after them."""
    images: tuple[PromptImage, ...] = ()
    """All images of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given(PromptPlan):
    """Ids that the client sent."""

    source: ClassVar[Source] = Source.GIVEN
    prompt: bytes
    reused: int
    """Number of ids that the client sent."""
    appended: int
    """Number of ids that a rendering adds after them."""
    images: tuple[PromptImage, ...] = ()
    """All images of the prompt."""


def prompt_of(plan: PromptPlan) -> bytes:
    """The prompt as a JSON array of ids; empty if the engine renders messages."""
    return plan.prompt if isinstance(plan, Extended | Given) else b""


def images_of(plan: PromptPlan) -> tuple[PromptImage, ...]:
    """The images in the ids of a planned prompt; none if the engine renders messages."""
    return plan.images if isinstance(plan, Extended | Given) else ()
