"""The identity of a turn: the scope of its ids, and the keys by which the index of a store finds it.

Law: two requests with equal scopes and equal messages have equal prompts, as far as the engine renders them.

A turn is found by its text under several digests of its conversation, from the exact spelling to one that
ignores what clients drop or repair.

A turn of completions is found by its ids. The index cannot hold a key for each id of a turn. So a turn is
under one key: the digest of its ids up to a *mark*, the largest number of a fixed sequence (1, 2, ... 64, 68,
... 256, 272, ...) that it has. A prompt is looked up under the digests of all its marks, and each turn found
is compared with it. The sequence is dense where turns are short, so that few turns share a key without having
equal ids. A second key is the digest of all ids of a turn. It tells whether several rollouts hold these ids.
"""

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from chat_tokenizer import CanonicalMessage
from chat_tokenizer.canonical import extend, start
from tokenproxy.base.request import Rendering
from tokenproxy.record.conversation import Conversation
from tokenproxy.record.store import IndexEntry
from tokenproxy.record.turn import Turn
from tokenproxy.record.vocabulary import Reason

CHANGED = (
    Reason.TOOLS_CHANGED,
    Reason.TEMPLATE_KWARGS_CHANGED,
    Reason.RENDERING_CHANGED,
    Reason.MODEL_CHANGED,
)
"""The reason for each of `Scope.parts`, if that part differs."""

EXACT = "exact"
"""Kind of key: the conversation as it was spelled."""
LOOSE = "loose"
"""Kind of key: the conversation, ignoring in assistant messages reasoning, white space around text, and
arguments of calls that equal the tool's default."""
BARE = "bare"
"""Kind of key: as LOOSE, and without the arguments of the last message's tool calls."""
KINDS = (EXACT, LOOSE, BARE)
"""The kinds of keys by which turns are found, in the order of `text_keys`."""
CONTENT = "content"
"""Kind of key: the last message alone, or with the one before it if it is short. Explains a miss."""
_PREFIX, _WHOLE = "ids-prefix", "ids-whole"

_STEPS = ((1024, 64), (256, 16), (64, 4), (0, 1))
"""Length from which marks are multiples of a step, and the step."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The tenant and session of a conversation, its model, and how it is rendered."""

    tenant: str
    """Digest of a verified credential; empty where no credentials are required."""
    session: str | None
    """The client's name of the session; None for conversations without one, whose name the proxy chose."""
    model: str
    """Base model or LoRA adapter."""
    parts: tuple[bytes, ...]
    """See `scope_parts`."""

    def key(self, kind: str, digest: bytes, *, explains: bool = False) -> bytes:
        """A key of the store's index: 16 bytes.

        Args:
            kind: what `digest` is a digest of.
            explains: leave out model and rendering: such keys only serve to explain a miss.
        """
        return bytes(self.hasher(kind, digest, explains=explains).digest())

    def hasher(self, kind: str, digest: bytes = b"", *, explains: bool = False) -> Any:
        """blake2b over the scope and a digest, which may be updated with more; see `key`."""
        tenant, session = self.tenant.encode(), (self.session or "").encode()
        lengths = (len(tenant).to_bytes(8, "little"), len(session).to_bytes(8, "little"))
        parts = () if explains else self.parts
        data = b"".join((lengths[0], tenant, lengths[1], session, *parts, digest))
        return hashlib.blake2b(data, digest_size=16, person=kind.encode())


def scope_parts(
    rendering: Rendering, rendered_fields: frozenset[str], model: str, tokenizer: str
) -> tuple[bytes, ...]:
    """Digests of tools, template arguments, other printed options, model with tokenizer; 16 bytes each.

    Args:
        rendered_fields: names in `rendering.options` that the engine's rendering prints.
        tokenizer: fingerprint of vocabulary and chat template; empty if unknown.

    Raises:
        msgspec.DecodeError: tools or template arguments have a wrong JSON type.
        InvalidMessages: they hold a value that JSON does not have.
    """
    options = {name: raw.decode() for name, raw in rendering.options.items() if name in rendered_fields}
    return (
        start(tools=rendering.parse_tools()),
        start(template_kwargs=rendering.parse_template_kwargs()),
        start(template_kwargs=options),
        start(model=f"{tokenizer}/{model}"),
    )


def recorded_with(turn: Turn, tokenizer: str) -> bool:
    """Whether a turn may have been recorded with a tokenizer: False if it is known to be another one.

    Args:
        tokenizer: fingerprint of vocabulary and chat template.
    """
    if len(turn.scope) != len(CHANGED):
        return True
    names = {turn.model, turn.requested_model}
    return turn.scope[-1] in {
        start(model=f"{fingerprint}/{name}") for name in names for fingerprint in (tokenizer, "")
    }


def changed_part(before: Collection[bytes], now: Collection[bytes]) -> Reason | None:
    """The reason for the first of `Scope.parts` in which two scopes differ; None if they are equal."""
    if len(before) != len(now):
        return Reason.MODEL_CHANGED
    differing = (reason for reason, a, b in zip(CHANGED, before, now, strict=True) if a != b)
    return next(differing, None)


def text_entries(
    scope: Scope, conversation: Conversation, message: CanonicalMessage, distinctive: bool, ids: bytes
) -> list[IndexEntry]:
    """The three index entries of a turn.

    Args:
        conversation: the messages of its request.
        message: the assistant's message.
        distinctive: see `ParsedMessage.distinctive`.
        ids: its `ids_digest`.
    """
    end = len(conversation.messages)
    before = conversation.loose_before(end)
    cut_off = any(argument[:1] == b"t" for argument in message.arguments)
    kind, digest = (BARE, message.without_arguments) if cut_off else (LOOSE, message.loose)
    return [
        IndexEntry(scope.key(EXACT, extend(conversation.strict_before(end), message.strict)), ids),
        IndexEntry(scope.key(kind, extend(before, digest)), ids),
        IndexEntry(content_key(scope, conversation, end, message, distinctive)),
    ]


def text_keys(scope: Scope, conversation: Conversation, end: int) -> list[bytes]:
    """The keys, of each kind in `KINDS`, of a turn that ends at one message of a conversation."""
    parsed = conversation.messages[end]
    keys = [scope.key(EXACT, parsed.strict), scope.key(LOOSE, parsed.loose)]
    if parsed.message.arguments:
        before = conversation.loose_before(end)
        keys.append(scope.key(BARE, extend(before, parsed.message.without_arguments)))
    return keys


def content_key(
    scope: Scope, conversation: Conversation, index: int, message: CanonicalMessage, distinctive: bool
) -> bytes:
    """The key that explains a miss; see `CONTENT`."""
    before = b"" if distinctive or not index else conversation.messages[index - 1].message.loose
    return scope.key(CONTENT, extend(before, message.loose), explains=True)


def ids_entries(scope: Scope, ids: bytes, ids_digest: bytes) -> list[IndexEntry]:
    """The index entries by which prompts of ids find a turn.

    Args:
        ids: the turn's prompt and completion, packed.
        ids_digest: as `Turn.ids_digest`.
    """
    count = len(ids) // 4
    prefix = scope.hasher(_PREFIX)
    prefix.update(memoryview(ids)[: 4 * (count - count % _step(count))])
    return [IndexEntry(prefix.digest()), IndexEntry(whole_key(scope, ids_digest), ids_digest)]


def whole_key(scope: Scope, ids_digest: bytes) -> bytes:
    """The key of all turns with these ids."""
    return scope.key(_WHOLE, ids_digest)


def prefix_keys(scope: Scope, ids: bytes) -> list[bytes]:
    """The keys of all marks of packed ids, the longest first."""
    hasher, done, keys = scope.hasher(_PREFIX), 0, list[bytes]()
    view = memoryview(ids)
    for mark in _marks(len(ids) // 4):
        hasher.update(view[4 * done : 4 * mark])
        done = mark
        keys.append(hasher.copy().digest())
    return keys[::-1]


def _step(count: int) -> int:
    return next(step for length, step in _STEPS if count >= length)


def _marks(count: int) -> Iterator[int]:
    """Yield all marks from 1 to `count`."""
    mark = 1
    while mark <= count:
        yield mark
        mark += _step(mark)
