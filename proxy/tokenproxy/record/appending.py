"""Builds prompts from ids and the suffix of the chat template. All extended prompts are built here.

Law: the result begins with the given ids.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from chat_tokenizer import ChatTokenizer, ids
from chat_tokenizer.encoder import NO_LIMIT, Limit
from chat_tokenizer.thinking import ends_thinking, hidden_reasoning
from tokenproxy.base.errors import BadRequest
from tokenproxy.base.fields import raw_value, read
from tokenproxy.base.request import ChatRequest, Rendering
from tokenproxy.record.audit import Auditor, Messages
from tokenproxy.record.cache import CachedTurn
from tokenproxy.record.conversation import Conversation
from tokenproxy.record.images import place, refs_in
from tokenproxy.record.placing import Placer
from tokenproxy.record.plan import ServedModel
from tokenproxy.record.turn import PromptImage


@dataclass(frozen=True, slots=True)
class Prefix:
    """Ids that a conversation consumed and sampled so far."""

    ids: bytes
    """A compact JSON array, checked."""
    count: int
    finish_reason: str | None = "stop"
    """How the last turn ended, as the engine reported it."""
    stop_reason: str | int | None = None


class NewMessages(NamedTuple):
    """The messages after a prefix."""

    field: str
    """The field of the request that holds them."""
    first: int
    """The index of the first one in that field."""
    parse: Callable[[], tuple[Messages, Messages | None]]
    """Returns them, and the messages that led to the prefix if those are known. Runs on a thread."""
    media: bool
    size: int
    """Bytes of the messages that are parsed."""


@dataclass(frozen=True, slots=True)
class Appended:
    """A prefix with messages after it."""

    prompt: bytes
    """The whole prompt as a compact JSON array."""
    appended: list[int]
    """The ids after the prefix."""
    images: list[PromptImage]
    """The images in `appended`."""


async def append(
    placer: Placer,
    request: ChatRequest,
    model: ServedModel,
    tokenizer: ChatTokenizer,
    prefix: Prefix,
    new: NewMessages,
    most_ids: int | None,
) -> Appended:
    """The prompt that continues a prefix with new messages.

    Args:
        most_ids: the most ids to append; None for any number.

    Raises:
        TooManyIds: there are more.
        TokenizationError: as `ChatTokenizer.append`; PlaceholdersDiffer if the appended ids hold
            another number of images than the messages.
        NotLoadable: the messages hold other media, or an image that the proxy does not load.
        BadRequest: an image is invalid.
        Overloaded: the limit of concurrent tokenising is reached.
    """
    stop = threading.Event()
    limit = Limit(most_ids, stop.is_set)

    def extend() -> tuple[list[int], Messages]:
        messages, history = new.parse()
        appended = suffix(tokenizer, prefix, messages, request.rendering, history, placer.auditor, limit)
        return appended, messages

    appended, messages = await placer.encoders.run(extend, new.size, tokenises=True, stop=stop)
    images: list[PromptImage] = []
    if model.images is not None and (new.media or model.images.placeholder in appended):
        refs = refs_in(messages, new.field, new.first) if new.media else []
        loaded = await placer.images.load(refs, model.images, new.field)
        appended, images = place(appended, model.images, loaded, prefix.count)
    return Appended(ids.join(prefix.ids, appended), appended, images)


def suffix(
    tokenizer: ChatTokenizer,
    prefix: Prefix,
    new: Messages,
    rendering: Rendering,
    history: Messages | None,
    auditor: Auditor | None = None,
    limit: Limit = NO_LIMIT,
) -> list[int]:
    """The ids that the chat template puts after a prefix for new messages.

    Args:
        history: the messages that led to the prefix, or None; the last one is the assistant's.
        auditor: compares a share of the suffixes with a rendering of the whole history.

    Raises:
        TokenizationError, Stopped: as `ChatTokenizer.append`.
    """
    following = tokenizer.append(
        [ids.last(prefix.ids)],
        new,
        history=history,
        tools=rendering.parse_tools(),
        finish_reason=prefix.finish_reason,
        # a stop token that only that request named does not end a turn for the template
        stop_reason=prefix.stop_reason if isinstance(prefix.stop_reason, str) else None,
        add_generation_prompt=rendering.add_generation_prompt,
        template_kwargs=rendering.parse_template_kwargs(),
        limit=limit,
    )
    if auditor is not None and history is not None:
        auditor.consider(tokenizer, history, new, rendering)
    return [*following.close_ids, *following.suffix_ids]


def prefix_of(turn: CachedTurn) -> Prefix:
    """The ids of a recorded turn."""
    return Prefix(turn.ids, turn.count, turn.finish_reason, turn.stop_reason)


def too_long(
    count: int, max_model_len: int, param: str, *, at_least: bool = False, hint: str = ""
) -> BadRequest:
    """The error for a prompt longer than the context, with vLLM's message, because clients parse it."""
    number = f"at least {count}" if at_least else str(count)
    return BadRequest(
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
        f"{number} input tokens, which exceeds this limit even without any output tokens. Please reduce the "
        f"length of `{param}`.{hint}",
        param=param,
    )


def is_truncated(request: ChatRequest) -> bool:
    """Whether the request tells the engine to truncate the prompt."""
    return raw_value(request.fields, "truncate_prompt_tokens") is not None


def most_prompt_ids(request: ChatRequest, max_model_len: int) -> int:
    """The most ids that a prompt may have so that the requested completion, or one id, fits after it."""
    for name in ("max_completion_tokens", "max_tokens"):
        try:
            if (requested := read(request.fields, name, int)) is not None:
                return max_model_len - max(1, requested)
        except BadRequest:
            continue  # the engine refuses it
    return max_model_len - 1


def shows_dropped_thinking(
    tokenizer: ChatTokenizer, turn: CachedTurn, conversation: Conversation, end: int, rendering: Rendering
) -> bool:
    """Whether the ids of a turn hold reasoning that the template would leave out of the next prompt.

    Args:
        conversation: the request's.
        end: index of the turn's message in it.

    Raises:
        InvalidMessages: the template refuses the messages.
    """
    messages = conversation.parse(0, len(conversation.raws))
    turns = [index for index in range(end + 1) if conversation.messages[index].assistant]
    thinking = {index for index, reasoning in zip(turns, turn.reasonings, strict=False) if reasoning}
    thinking |= {index for index in turns if ends_thinking(messages[index])}
    if not thinking:
        return False
    tools, kwargs = rendering.parse_tools(), rendering.parse_template_kwargs()
    hidden = hidden_reasoning(tokenizer, messages, thinking, tools=tools, template_kwargs=kwargs)
    first = turns[turn.rendered_turns]
    if not hidden or max(hidden) >= first:
        return bool(hidden)
    # the engine rendered these messages for the first turn, perhaps with reasoning that would now be left out
    rendered = {index for index in thinking if index < first}
    before = hidden_reasoning(tokenizer, messages[:first], rendered, tools=tools, template_kwargs=kwargs)
    return not hidden <= before
