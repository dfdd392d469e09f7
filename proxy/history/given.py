"""Prompts with ids from the client: appends messages to them, and finds where their turns are recorded."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from proxy.errors import BadRequest, NotReady, Unsupported
from proxy.history.audit import Auditor
from proxy.history.cached_turn import CachedTurn
from proxy.history.claims import Claims
from proxy.history.context import check_ids_fit, is_truncated, too_long
from proxy.history.continuation import continue_ids, continue_turn
from proxy.history.conversation import Conversation
from proxy.history.given_images import no_images, objects
from proxy.history.images import NotLoadable, place, refs_in
from proxy.history.matcher import AmbiguousImages, Match, same_images
from proxy.history.placing import UNREADABLE, Placer
from proxy.history.plan import Placement, ServedModel
from proxy.history.prompt_image import PromptImage
from proxy.history.store import session_id
from proxy.history.turn import request_time
from proxy.turn.request import ChatRequest, GivenIds
from tokenization import ChatTokenizer, InvalidIds, TemplateUnsupported, TokenizationError, ids
from tokenization.encoder import Limit
from tokenization.errors import TooManyIds

_APPEND = "append_messages"


@dataclass(frozen=True, slots=True)
class AppendedMessages:
    """Given ids with messages after them."""

    prompt: bytes
    """The whole prompt as a compact JSON array."""
    appended: list[int]
    """The ids after the given ones."""
    images: list[PromptImage]
    """The images in `appended`."""


async def append_messages(
    placer: Placer, request: ChatRequest, given: GivenIds, model: ServedModel, *, to_complete: bool = True
) -> AppendedMessages:
    """Append messages to given ids with the chat template.

    Args:
        to_complete: whether a completion follows, so that the whole prompt must fit the model's context.
            Otherwise only the appended ids must.

    Raises:
        BadRequest: the template refuses the messages, or an image is invalid.
        BadRequest: the prompt is longer than the model's context.
        Unsupported: there is no tokenizer, or no exact append for this template.
        Overloaded: the limit of concurrent tokenising is reached.
        NotReady: there is no history, and the template has not been examined yet.
    """
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise model.tokenizer_error or Unsupported("appending needs the model's tokenizer")
    if to_complete:
        check_ids_fit(request, given, model)
    before = given.count if to_complete and not is_truncated(request) else 0
    most_ids = None if model.max_model_len is None else model.max_model_len - before
    stop = threading.Event()
    limit = Limit(most_ids, stop.is_set)

    def append() -> tuple[bytes, list[int]]:
        return _append(tokenizer, request, given, placer.auditor, limit)

    with _as_api_errors(given, before, model):
        _refuse_reserved(tokenizer, request)
        size = len(request.append or b"[]") + len(request.messages)
        prompt, appended = await placer.encoders.run(
            append, size, tokenises=True, tenant=request.tenant, stop=stop
        )
        if model.images is None or not (_APPEND in request.media or model.images.placeholder in appended):
            return AppendedMessages(prompt, appended, [])
        try:
            messages = objects(request.append or b"[]", _APPEND) if _APPEND in request.media else []
            refs = refs_in(messages, _APPEND)
            loaded = await placer.images.load(refs, model.images, _APPEND, request.tenant)
            appended, images = place(appended, model.images, loaded, given.count)
        except NotLoadable as error:
            raise BadRequest(str(error), param=_APPEND, code="image_not_loaded") from error
        return AppendedMessages(ids.join(ids.compact(given.raw), appended), appended, images)


def _append(
    tokenizer: ChatTokenizer, request: ChatRequest, given: GivenIds, auditor: Auditor, limit: Limit
) -> tuple[bytes, list[int]]:
    """Parse and tokenise the messages to append. Takes long: call it on an encoder thread."""
    appended = request.append or b"[]"
    new = objects(appended, "append_messages")
    history = _history(request, len(new))
    if history is None and tokenizer.proof is None:
        raise NotReady(
            "the chat template is still being examined, which takes seconds after the start: send the "
            "conversation as `messages` too, or try again",
            param="messages",
            code="template_unproved",
        )
    raw = ids.compact(given.raw)
    return continue_ids(tokenizer, raw, new, request.rendering, history=history, auditor=auditor, limit=limit)


def _history(request: ChatRequest, new: int) -> list[dict[str, Any]] | None:
    """The messages that led to the given ids; None if the request does not hold them.

    Args:
        new: number of messages to append. They are the end of the request's messages.
    """
    if not request.messages:
        return None
    whole = objects(request.messages, "messages")
    earlier = whole[: len(whole) - new]
    return earlier if earlier and earlier[-1].get("role") == "assistant" else None


def _refuse_reserved(tokenizer: ChatTokenizer, request: ChatRequest) -> None:
    """Raise BadRequest if the template arguments hold an argument of the renderer."""
    if reserved := tokenizer.reserved(request.rendering.parse_template_kwargs()):
        raise BadRequest(
            f"`chat_template_kwargs` cannot set {', '.join(reserved)} together with `append_messages`",
            param="chat_template_kwargs",
        )


@contextmanager
def _as_api_errors(given: GivenIds, before: int, model: ServedModel) -> Iterator[None]:
    """Replace the errors of an append by API errors that name the request's field.

    Args:
        before: number of ids before the appended ones that count against the model's context.
    """
    try:
        yield
    except TooManyIds as error:
        assert model.max_model_len is not None  # else there is no limit
        count = before + error.count
        raise too_long(count, model.max_model_len, "append_messages", at_least=error.at_least) from error
    except msgspec.DecodeError as error:
        raise BadRequest(f"`tools`: {error}", param="tools") from error
    except TemplateUnsupported as error:
        raise Unsupported(
            f"cannot append exactly: {error}", param="append_messages", code="template_unsupported"
        ) from error
    except InvalidIds as error:
        raise BadRequest(f"`{given.field}` {error}", param=given.field) from error
    except TokenizationError as error:
        raise BadRequest(f"`append_messages`: {error}", param="append_messages") from error


async def place_given(
    placer: Placer,
    request: ChatRequest,
    prompt: bytes,
    model: ServedModel,
    claims: Claims,
    images: Sequence[PromptImage] = (),
) -> Placement:
    """Find where to record the turn of a request with given ids.

    It is recorded in its session, else in the rollout that its messages continue, else in a new rollout if it
    has messages, else nowhere. It is findable by its text only if its ids are exactly those of the recorded
    conversation.

    Args:
        prompt: the whole prompt as a compact JSON array.
        images: those of the prompt. A turn with the same ids and other images is not continued.

    Raises:
        BadRequest: the prompt continues a turn with images, and the engine takes none together with ids.
    """
    whole = bool(request.messages)
    try:
        messages = request.messages or request.append or b"[]"
        conversation = await placer.parse(request, messages)
        scope = placer.scope(request, model)
    except UNREADABLE:
        return placer.nowhere(request, model)  # the engine refuses them
    if not request.record:
        return placer.nowhere(request, model)
    match = Match()
    if whole:
        match = await placer.match(
            request, conversation, scope, claims, lambda turn: _continues(turn, prompt, images)
        )
    proved = whole and await _proves(placer, conversation, match, prompt, request, model)
    if request.session is None and not whole:
        return placer.nowhere(request, model)
    placement = placer.place(request, model, scope, conversation, match)
    parent, first_new = match.turn, match.end + 1
    if parent is not None and parent.rollout != placement.session.id:
        parent = None
    if parent is None and request.session is not None:
        rollout = session_id(request.tenant, request.session.name)
        if model.images is None:
            parent = await _without_images(placer, prompt, rollout, request)
        else:
            parent = await placer.longest_prefix(prompt, rollout, images)
        first_new = conversation.ends[0] + 1 if whole and conversation.ends else 0
    return replace(
        placement,
        parent=parent,
        first_new=first_new if parent else 0,
        findable=proved,
        holder=placement.holder or (parent.replica if parent else ""),
        held_since=placement.held_since or (request_time(parent.id) if parent else 0.0),
    )


def _continues(turn: CachedTurn, prompt: bytes, images: Sequence[PromptImage]) -> bool:
    """Whether a prompt with these images begins with the ids and the images of a turn."""
    return turn.begins(prompt) and same_images(turn.images, images[: len(turn.images)])


async def _without_images(
    placer: Placer, prompt: bytes, rollout: str, request: ChatRequest
) -> CachedTurn | None:
    """The turn of a rollout that a prompt continues on an engine that takes no images together with ids.

    Raises:
        BadRequest: the turn holds images: without them, the engine would read their placeholders as text.
    """
    try:
        turn = await placer.longest_prefix(prompt, rollout)
        if turn is None or not turn.images:
            return turn
    except AmbiguousImages:
        pass  # at least one of these turns holds images
    raise no_images(request.given.field if request.given else "messages")


async def _proves(
    placer: Placer,
    conversation: Conversation,
    match: Match,
    prompt: bytes,
    request: ChatRequest,
    model: ServedModel,
) -> bool:
    """Whether a prompt equals the proxy's own: recorded ids, then the template's suffix."""
    tokenizer = model.tokenizer
    if tokenizer is None or conversation.media or not request.findable:
        return False
    if match.turn is None and conversation.holds_assistant:
        return False  # its earlier turns were sampled elsewhere: a rendering proves nothing about them

    stop = threading.Event()
    # stop at more ids than the prompt has: they cannot be equal
    limit = Limit(ids.check(prompt), stop.is_set)

    def prove() -> bool:
        try:
            if match.turn is not None:
                expected, _ = continue_turn(
                    tokenizer, match.turn, conversation, match.end, request.rendering, limit=limit
                )
            else:
                expected = ids.dump(
                    tokenizer.render(
                        conversation.parse(0, len(conversation.raws)),
                        tools=request.rendering.parse_tools(),
                        add_generation_prompt=request.rendering.add_generation_prompt,
                        template_kwargs=request.rendering.parse_template_kwargs(),
                        limit=limit,
                    )
                )
        except TokenizationError:
            return False
        return expected == prompt

    size = sum(memoryview(raw).nbytes for raw in conversation.raws[match.end + 1 :])
    return await placer.encoders.run(prove, size, tokenises=True, tenant=request.tenant, stop=stop)
