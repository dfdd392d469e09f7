"""What the chat template puts after ids, and the audits of that.

What the template appends is proved with many conversations, but not with all. So the first append of each
kind of conversation, and a share of the others, is compared with a rendering of the whole history after the
prompt was planned. After one difference, such appends with this template render the whole history.
"""

import json
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from chat_tokenizer import ChatTokenizer, ids
from chat_tokenizer.cache import BoundedCache
from chat_tokenizer.chat import LAST_IDS
from chat_tokenizer.encoder import Limit
from chat_tokenizer.thinking import ends_thinking, hidden_reasoning
from tokenproxy.base.errors import BadRequest
from tokenproxy.base.fields import raw_value, read
from tokenproxy.base.request import ChatRequest, GivenIds, Rendering
from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.record.cache import CachedTurn
from tokenproxy.record.identity import Conversation
from tokenproxy.record.plan import ServedModel
from tokenproxy.record.turn import PromptImage

Messages = Sequence[Mapping[str, Any]]

log = logging.getLogger("tokenproxy")

SHARE = 0.01
"""Share of the appends that are audited, besides the first of each kind."""
MAX_WAITING = 32
"""Number of audits that may wait. Further ones are skipped: under load the share shrinks, and the proxy does
not slow down."""
_SHOWN_CHARACTERS = 2_000


@dataclass(frozen=True, slots=True)
class Continuation:
    """Ids that a conversation consumed and sampled so far, and the messages after them."""

    ids: bytes
    """A compact JSON array, checked."""
    count: int
    """Number of these ids."""
    turn: CachedTurn | None
    """The recorded turn whose ids they are; None if the client sent them."""
    field: str
    """The field of the request that holds the messages."""
    first: int
    """The index of the first one in that field."""
    parse: Callable[[], tuple[Messages, Messages | None]]
    """Returns them, and the messages that led to the ids if those are known. Runs on a thread."""
    media: bool
    """Whether the messages hold images or other media."""
    size: int
    """Bytes of the messages that are parsed."""


@dataclass(frozen=True, slots=True)
class Appended:
    """Ids with messages after them."""

    prompt: bytes
    """The whole prompt as a compact JSON array."""
    appended: int
    """Number of ids of the messages."""
    images: list[PromptImage]
    """The images in these ids."""


def suffix(
    tokenizer: ChatTokenizer,
    prefix: bytes,
    turn: CachedTurn | None,
    new: Messages,
    rendering: Rendering,
    history: Messages | None,
    limit: Limit,
) -> list[int]:
    """The ids that the chat template puts after others for new messages.

    Args:
        prefix: these other ids, a JSON array.
        turn: the recorded turn whose ids they are; None if the client sent them.
        history: the messages that led to the prefix, or None; the last one is the assistant's.

    Raises:
        TokenizationError, Stopped: as `ChatTokenizer.append`.
    """
    stop_reason = turn.stop_reason if turn is not None else None
    following = tokenizer.append(
        ids.last(prefix, LAST_IDS),
        new,
        history=history,
        finish_reason=turn.finish_reason if turn is not None else "stop",
        # a stop token that only that request named does not end a turn for the template
        stop_reason=stop_reason if isinstance(stop_reason, str) else None,
        limit=limit,
        **rendering.parsed(),
    )
    return [*following.close_ids, *following.suffix_ids]


def too_long(
    model: ServedModel, count: int, param: str, *, at_least: bool = False, hint: str = ""
) -> BadRequest:
    """The error for a prompt longer than the context, with vLLM's message, because clients parse it."""
    number = f"at least {count}" if at_least else str(count)
    return BadRequest(
        f"This model's maximum context length is {model.max_model_len} tokens. However, your prompt contains "
        f"{number} input tokens, which exceeds this limit even without any output tokens. Please reduce the "
        f"length of `{param}`.{hint}",
        param=param,
    )


def check_ids_fit(request: ChatRequest, given: GivenIds, model: ServedModel) -> None:
    """Refuse given ids that are longer than the context, unless the engine is to truncate them.

    Raises:
        BadRequest: they are longer; `param` is the client's name for them.
    """
    if is_truncated(request):
        return
    if model.max_model_len is not None and given.count > model.max_model_len:
        raise too_long(model, given.count, given.field)


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
    messages = conversation.parse()
    turns = [index for index in range(end + 1) if conversation.messages[index].assistant]
    thinking = {
        index for index, reasoning in zip(turns, turn.reasonings, strict=False) if any(reasoning[:16])
    }
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


class Auditor:
    """Decides which appends are audited, and audits them one at a time, off the event loop."""

    def __init__(self, metrics: Metrics, proof_folder: Path | None, share: float = SHARE) -> None:
        """Audit nothing yet.

        Args:
            proof_folder: holds the proofs, which a difference changes; None keeps them in memory.
            share: of the appends after the first of each kind, from 0 to 1.
        """
        self._metrics = metrics
        self._share = share
        self._proof_folder = proof_folder
        self._thread = ThreadPoolExecutor(1, "audit")
        self._audited_kinds: BoundedCache[object, bool] = BoundedCache(4096)
        self._waiting = 0

    def consider(
        self, tokenizer: ChatTokenizer, history: Messages, new: Messages, rendering: Rendering
    ) -> None:
        """Audit an append later, if it is the first of its kind or drawn. Any thread may call it."""
        local = tokenizer.is_local(new, rendering.parse_template_kwargs(), history)
        if not local or self._waiting >= MAX_WAITING:
            return
        kind = _kind(tokenizer, history, new, rendering)
        first = self._audited_kinds.get(kind) is None
        if not first and random.random() >= self._share:
            return
        self._audited_kinds.put(kind, True)
        self._waiting += 1
        refute = partial(tokenizer.audit, new, history, folder=self._proof_folder, **rendering.parsed())
        self._thread.submit(self._audit, refute, tokenizer.source, new)

    def close(self) -> None:
        """Drop the waiting audits, and end the thread after the running one."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _audit(self, refute: Callable[[], Messages | None], source: str, new: Messages) -> None:
        try:
            refuted = refute()
        except Exception:  # the boundary of the thread: the append itself succeeded
            log.exception("an append could not be audited")
            return
        finally:
            self._waiting -= 1
        self._metrics.audits.labels("same" if refuted is None else "different").inc()
        if refuted is not None:
            example = json.dumps({"history": refuted, "new": new}, ensure_ascii=False, default=repr)
            log.error(
                "the chat template of %s appends other text after the whole history than was proved; from "
                "now on the whole history is rendered. Smallest example found: %s",
                source,
                example[:_SHOWN_CHARACTERS],
            )


def _kind(tokenizer: ChatTokenizer, history: Messages, new: Messages, rendering: Rendering) -> object:
    """The kind of a conversation: length of the history, last turn, new messages, options."""
    turn = history[-1]
    return (
        tokenizer.fingerprint,
        len(history).bit_length(),
        history[0].get("role"),
        bool(turn.get("content")),
        bool(turn.get("reasoning") or turn.get("reasoning_content")),
        len(turn.get("tool_calls") or ()),
        tuple(message.get("role") for message in new[:8]),
        bool(rendering.tools),
        rendering.add_generation_prompt,
        tuple(sorted(rendering.parse_template_kwargs())),
    )
