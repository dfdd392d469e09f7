"""Turns that clients send back in forms that have a reason: see `chat_tokenizer.equivalences`.

The index finds them by a digest that other messages share, so each is compared with what was recorded.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from chat_tokenizer import InvalidMessages
from chat_tokenizer.canonical import echo_reason
from tokenproxy.record.cache import CachedTurn
from tokenproxy.record.encoders import EncoderPool
from tokenproxy.record.identity import Conversation, LazyMessages
from tokenproxy.record.store import Store
from tokenproxy.record.turn import Turn

_messages = msgspec.json.Decoder(list[dict[str, Any]]).decode
_message = msgspec.json.Decoder(dict[str, Any]).decode


async def reason_of(
    store: Store, encoders: EncoderPool, conversation: Conversation, end: int, path: Sequence[Turn]
) -> str | None:
    """The reason for which the messages up to `end` are those of a recorded turn; None if they are not.

    Args:
        path: the turn alone; empty if it was evicted.
    """
    alike = bool(path) and path[-1].spelling_before == conversation.strict_before(end)
    path = path if alike or not path else await store.path(path[-1].id)
    if not path:
        return None

    def compare() -> str | None:
        recorded = list[dict[str, Any]]()
        for each in path:
            recorded += () if alike else _messages(each.messages)
            recorded.append(_message(each.message))
        sent = [_message(raw) for raw in conversation.raws[end if alike else 0 : end + 1]]
        earlier = conversation.messages[:end] if alike else ()
        ids = {each for parsed in earlier for each in parsed.message.call_ids if isinstance(each, str)}
        return echo_reason(sent, recorded, conversation.equivalents, ids)

    try:
        return await encoders.run(compare, 0 if alike else conversation.size())
    except (msgspec.DecodeError, UnicodeDecodeError, InvalidMessages):
        return None  # what cannot be read is not found


async def is_continued(store: Store, turn: Turn) -> bool:
    """Whether a later turn of its rollout continues a turn."""
    if await store.newest(turn.rollout, 1) == [turn.id]:
        return False
    return any(other.parent == turn.id for other in await store.turns(turn.rollout))


def messages_after(
    conversation: Conversation, end: int, turn: CachedTurn, recorded: bytes
) -> tuple[list[dict[str, Any]], Sequence[dict[str, Any]]]:
    """The messages after the one at `end`, and those up to it.

    Args:
        turn: the turn that ends there.
        recorded: its message as JSON, if the client sent it back in a form that has a reason; else empty. It
            replaces that form, and the results of its calls get the recorded ids.
    """
    new, history = conversation.parse(end + 1), conversation.raws[: end + 1]
    if recorded:
        history = [*history[:-1], msgspec.Raw(recorded)]
        pairs = zip(conversation.messages[end].message.call_ids, turn.call_ids, strict=False)
        renamed = {sent: own for sent, own in pairs if isinstance(sent, str)}
        for message in new:
            if isinstance(called := message.get("tool_call_id"), str):
                message["tool_call_id"] = renamed.get(called, called)
    return new, LazyMessages(history)
