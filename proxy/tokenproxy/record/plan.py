"""How the prompt of one request is made, and where its turn is recorded."""

import time
from collections.abc import Sequence

import msgspec

from chat_tokenizer import ChatTokenizer
from tokenproxy.base.errors import ApiError
from tokenproxy.base.request import ChatRequest, EngineRoute
from tokenproxy.record.cache import CachedTurn
from tokenproxy.record.completion import Batch
from tokenproxy.record.identity import Conversation, Scope
from tokenproxy.record.images import ImageModel, LoadedImage
from tokenproxy.record.match import Match, rollout_of
from tokenproxy.record.origin import is_probe
from tokenproxy.record.store import Session, session_id
from tokenproxy.record.turn import PromptImage, new_id
from tokenproxy.record.vocabulary import Reason, Source


class ServedModel(msgspec.Struct, frozen=True):
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


class PromptPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How the prompt of a request is made, and where its turn is recorded."""

    request: ChatRequest
    session: Session
    """The rollout that the turn belongs to; created when the turn is recorded."""
    scope: Scope
    conversation: Conversation | None
    """The request's messages; None if they could not be read, or if nothing is to be recorded."""
    turn_id: str = msgspec.field(default_factory=new_id)
    """The turn id of choice 0; see `turn.turn_id`."""
    new_rollout: bool = False
    """Whether this is the first turn of the rollout, under a name that the proxy chose."""
    findable: bool
    """Whether the turn may be found by the text of its conversation."""
    match: Match = Match()
    """The turn that the request continues, in any rollout."""
    parent: CachedTurn | None = None
    """The turn of the same rollout whose ids the prompt begins with."""
    first_new: int = 0
    """Index of the first message of the request after the parent's conversation."""
    logprobs_mode: str = ""
    source: Source = Source.RENDERED
    reason: Reason | None = None
    prompt: bytes = b""
    """The whole prompt as a JSON array of ids; empty if the engine makes it of messages or a text, or reads
    the ids from the request itself."""
    reused: int = 0
    """Number of ids of the prompt that were recorded, or that the client sent."""
    appended: int = 0
    """Number of ids after them."""
    images: tuple[PromptImage, ...] = ()
    """All images of `prompt`."""
    rendered_images: Sequence[LoadedImage] | None = None
    """The images of messages that the engine renders, in their order; None if their ids are not known."""
    placeholder: int = 0
    """The id that stands for an image; only if there are `rendered_images`."""
    others: tuple["PromptPlan", ...] = ()
    """The plans of the request's other prompts; only a completions request has several."""

    @property
    def holder(self) -> str:
        """Name of the replica that served the matched turn and may hold its ids; empty if unknown."""
        return self.match.turn.replica if self.match.turn is not None else ""

    @property
    def prompts(self) -> tuple["PromptPlan", ...]:
        """The plan of each prompt of the request, in the order of the prompts."""
        return (self, *self.others)

    @property
    def batch(self) -> Batch | None:
        """The prompts of a completions request as they are sent; None for the other routes."""
        if self.request.engine_route is not EngineRoute.COMPLETIONS:
            return None
        return Batch(tuple(prompt.prompt for prompt in self.prompts), self.request.choices)

    @property
    def rollout(self) -> str | None:
        """The rollout of all prompts; None if they belong to several, or are not recorded."""
        rollout = self.session.id if self.conversation is not None else None
        same = not self.others or all(each.session.id == rollout for each in self.others)
        return rollout if same else None


def place(
    request: ChatRequest, model: ServedModel, scope: Scope, conversation: Conversation | None, match: Match
) -> PromptPlan:
    """The plan of a prompt that the engine renders, in the rollout of the request: its session, else that of
    the turn it continues, else a new one."""
    rollout, new = rollout_of(request), False
    if rollout is None and match.turn is not None and match.same_rollout:
        rollout = match.turn.rollout
    elif rollout is None:
        rollout, new = session_id(request.tenant, new_id()), True
    recorded = request.record and (request.must_record or not is_probe(request.headers))
    session = Session(
        id=rollout,
        tenant=request.tenant,
        explicit=request.session is not None and request.session.explicit,
        ambiguous=match.shared is not None or match.reason is Reason.AMBIGUOUS,
        created=time.time(),
    )
    return PromptPlan(
        request=request,
        session=session,
        scope=scope,
        conversation=conversation if recorded else None,
        new_rollout=new,
        findable=request.findable,
        match=match,
        logprobs_mode=model.logprobs_mode,
        reason=match.reason,
    )


def place_nowhere(request: ChatRequest, model: ServedModel) -> PromptPlan:
    """The plan of a turn that is not recorded."""
    scope = Scope(request.tenant, None, request.model or model.name, ())
    return place(request, model, scope, None, Match())
