"""Prompts whose ids the client sent: what is appended to them, and where their turns belong."""

from dataclasses import replace
from typing import Any

import msgspec

from proxy.errors import BadRequest, NotReady, Unsupported
from proxy.history.cached_turn import CachedTurn
from proxy.history.continuation import continue_ids, continue_turn
from proxy.history.conversation import Conversation
from proxy.history.matcher import Match
from proxy.history.placing import UNREADABLE, Placer
from proxy.history.plan import Placement, ServedModel
from proxy.history.store import StoreError, session_id
from proxy.turn.request import ChatRequest, GivenIds
from tokenization import InvalidIds, TemplateUnsupported, TokenizationError, ids


async def append_messages(
    placer: Placer, request: ChatRequest, given: GivenIds, model: ServedModel
) -> tuple[bytes, list[int]]:
    """Given ids, and what the template puts after them for the messages to append.

    Returns:
        the prompt as a compact JSON array, and the ids after the given ones.

    Raises:
        BadRequest: the template refuses the messages.
        Unsupported: there is no tokenizer, or no exact append for this template.
        NotReady: there is no history, and the template is not proved yet.
    """
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise model.tokenizer_error or Unsupported("appending needs the model's tokenizer")
    new = _objects(request.append or b"[]", "append_messages")
    # the request's messages are the whole conversation: the history, then those to append
    whole = _objects(request.messages, "messages") if request.messages else []
    before = whole[: len(whole) - len(new)]
    history = before if before and before[-1].get("role") == "assistant" else None
    if history is None and tokenizer.proof is None:
        raise NotReady(
            "the chat template is still being examined, which takes seconds after the start: send the "
            "conversation as `messages` too, or try again",
            param="messages",
            code="template_unproved",
        )
    raw = ids.compact(given.raw)
    try:
        if reserved := tokenizer.reserved(request.rendering.parse_template_kwargs()):
            raise BadRequest(
                f"`chat_template_kwargs` cannot set {', '.join(reserved)} together with `append_messages`",
                param="chat_template_kwargs",
            )
        return await placer.in_thread(
            lambda: continue_ids(
                tokenizer, raw, new, request.rendering, history=history, auditor=placer.auditor
            )
        )
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


async def place_given(placer: Placer, request: ChatRequest, prompt: bytes, model: ServedModel) -> Placement:
    """Where the turn of a request whose client sent ids is recorded: nowhere if it cannot be placed.

    It belongs to its session, or to the rollout that its messages continue, or to a new one if it has
    messages. It is findable by its text if that is proved: its ids are exactly those that the conversation
    has here.

    Args:
        prompt: the whole prompt as a compact JSON array.
    """
    whole = bool(request.messages)
    try:
        conversation = await placer.parse(request.messages or request.append or b"[]")
        scope = placer.scope(request, model)
    except UNREADABLE:
        return placer.nowhere(request, model)  # the engine refuses them
    if not request.record:
        return placer.nowhere(request, model)
    match = await placer.match(request, conversation, scope) if whole else Match()
    claimed = placer.place(request, model, scope, conversation, match)
    async with placer.released_on_error(claimed):
        if match.turn is not None and not match.turn.begins(prompt):
            await placer.release(claimed)
            match = Match()
        proved = whole and await _proves(placer, conversation, match, prompt, request, model)
        if request.session is None and not whole:
            return placer.nowhere(request, model)
        placement = placer.place(request, model, scope, conversation, match)
        parent, first_new = match.turn, match.end + 1
        if parent is not None and parent.rollout != placement.session.id:
            parent = None
        if parent is None and request.session is not None:
            parent = await _by_ids(placer, prompt, session_id(request.tenant, request.session.name))
            first_new = conversation.ends[0] + 1 if whole and conversation.ends else 0
        return replace(placement, parent=parent, first_new=first_new if parent else 0, findable=proved)


async def _by_ids(placer: Placer, prompt: bytes, rollout: str) -> CachedTurn | None:
    """The turn of a rollout whose ids a prompt begins with."""
    try:
        return await placer.matcher.longest_prefix(prompt, rollout)
    except StoreError as error:
        placer.report("a turn is recorded without the one before it", error)
        return None


async def _proves(
    placer: Placer,
    conversation: Conversation,
    match: Match,
    prompt: bytes,
    request: ChatRequest,
    model: ServedModel,
) -> bool:
    """Whether a prompt is exactly what its conversation has here: recorded ids, then the template's."""
    tokenizer = model.tokenizer
    if tokenizer is None or conversation.media or not request.findable:
        return False
    if match.turn is None and conversation.holds_assistant:
        return False  # its earlier turns were sampled elsewhere: a rendering proves nothing about them

    def prove() -> bool:
        try:
            if match.turn is not None:
                expected, _ = continue_turn(tokenizer, match.turn, conversation, match.end, request.rendering)
            else:
                expected = ids.dump(
                    tokenizer.render(
                        conversation.parse(0, len(conversation.raws)),
                        tools=request.rendering.parse_tools(),
                        add_generation_prompt=request.rendering.add_generation_prompt,
                        template_kwargs=request.rendering.parse_template_kwargs(),
                    )
                )
        except TokenizationError:
            return False
        return expected == prompt

    return await placer.in_thread(prove)


def _objects(raw: bytes, field: str) -> list[dict[str, Any]]:
    """A JSON array of objects. Raises BadRequest, naming `field`."""
    try:
        return msgspec.json.decode(raw, type=list[dict[str, Any]])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"`{field}`: {error}", param=field) from error
