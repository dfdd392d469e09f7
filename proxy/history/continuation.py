"""Builds a prompt from ids and the suffix of the chat template. All extended prompts are built here.

Law: the result begins with the bytes of the given ids.
"""

from collections.abc import Sequence
from typing import Any

from proxy.history.audit import Auditor
from proxy.history.cached_turn import CachedTurn
from proxy.history.conversation import Conversation
from proxy.turn.request import Rendering
from tokenization import ChatTokenizer, ids
from tokenization.encoder import NO_LIMIT, Limit


def continue_ids(
    tokenizer: ChatTokenizer,
    raw: bytes,
    new: Sequence[dict[str, Any]],
    rendering: Rendering,
    *,
    history: Sequence[dict[str, Any]] | None = None,
    finish_reason: str | None = "stop",
    stop_reason: str | int | None = None,
    auditor: Auditor | None = None,
    limit: Limit = NO_LIMIT,
) -> tuple[bytes, list[int]]:
    """The next prompt of a conversation that is already ids.

    Args:
        raw: all ids consumed and sampled so far, a checked JSON array.
        new: the messages after them.
        history: the messages that led to the ids, or None; the last one is the assistant's.
        finish_reason, stop_reason: how the last turn ended, as the engine reported it.
        auditor: compares a share of the appends with a rendering of the whole history.
        limit: for the ids after `raw`.

    Returns:
        the whole prompt as a JSON array, and the ids after `raw`.

    Raises:
        TokenizationError, Stopped: as `ChatTokenizer.append`.
    """
    following = tokenizer.append(
        [ids.last(raw)],
        new,
        history=history,
        tools=rendering.parse_tools(),
        finish_reason=finish_reason,
        # a stop token that only that request named does not end a turn for the template
        stop_reason=stop_reason if isinstance(stop_reason, str) else None,
        add_generation_prompt=rendering.add_generation_prompt,
        template_kwargs=rendering.parse_template_kwargs(),
        limit=limit,
    )
    if auditor is not None and history is not None:
        auditor.consider(tokenizer, history, new, rendering)
    appended = [*following.close_ids, *following.suffix_ids]
    return ids.join(raw, appended), appended


def continue_turn(
    tokenizer: ChatTokenizer,
    turn: CachedTurn,
    conversation: Conversation,
    end: int,
    rendering: Rendering,
    auditor: Auditor | None = None,
    limit: Limit = NO_LIMIT,
) -> tuple[bytes, list[int]]:
    """The next prompt after a recorded turn, whose message is at index `end` of a conversation.

    Returns and raises as `continue_ids`.
    """
    return continue_ids(
        tokenizer,
        turn.ids,
        conversation.parse(end + 1, len(conversation.raws)),
        rendering,
        history=conversation.history(end + 1),
        finish_reason=turn.finish_reason,
        stop_reason=turn.stop_reason,
        auditor=auditor,
        limit=limit,
    )
