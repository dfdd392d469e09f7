"""The identity of a turn: digests of its messages, its scope, and the keys by which the index finds it.

Law: two requests with equal scopes and equal messages have equal prompts, as far as the engine renders them.

A turn is found by its text under several digests of its conversation, from the exact spelling to one that
ignores what clients drop or repair. The digests do not depend on model or tenant, and on tools only by the
defaults that these declare: all are in the `Scope`, which is part of every key of the index.

A turn of completions is found by its ids. The index cannot hold a key for each id of a turn. So a turn is
under one key: the digest of its ids up to a *mark*, the largest number of a fixed sequence (1, 2, ... 64, 68,
... 256, 272, ...) that it has. A prompt is looked up under the digests of all its marks, and each turn found
is compared with it. The sequence is dense where turns are short, so that few turns share a key without having
equal ids. A second key is the digest of all ids of a turn. It tells whether several rollouts hold these ids.
"""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, overload

import msgspec

from chat_tokenizer import CanonicalMessage, InvalidMessages, canonical
from chat_tokenizer.canonical import extend, start
from chat_tokenizer.equivalences import NO_EQUIVALENTS, Equivalents
from chat_tokenizer.messages import arguments_for_template, tools_for_template
from tokenproxy.base.fields import values_in
from tokenproxy.base.request import Rendering, media_kind
from tokenproxy.record.turn import IndexEntry, Turn
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
"""Kind of key: the conversation in the form of the equivalences that need no reason."""
BARE = "bare"
"""Kind of key: as LOOSE, and without the arguments of the last message's tool calls."""
KINDS = (EXACT, LOOSE, BARE)
"""The kinds of keys by which turns are found, in the order of `text_keys`."""
LENIENT = "lenient"
"""Kind of key: as LOOSE, in the form of the equivalences that have a reason, too. It is recorded only for
conversations with tool calls, and looked up only if the others find nothing."""
CONTENT = "content"
"""Kind of key: the last message alone, or with the one before it if it is short. Explains a miss."""
_PREFIX, _WHOLE = "ids-prefix", "ids-whole"

_STEPS = ((1024, 64), (256, 16), (64, 4), (0, 1))
"""Length from which marks are multiples of a step, and the step."""

_parse = msgspec.json.Decoder(dict[str, Any]).decode
NOTHING = start()
"""Digest of a conversation before its first message."""
_DISTINCTIVE_BYTES = 120
"""A message with at least this many bytes is not sampled twice by chance."""
_COUNTED_FROM_BYTES = 2**19
MOST_VALUES = 400_000
"""The most values of a message besides its text: reading them keeps the interpreter's lock for 50 ms."""


class ParsedMessage(msgspec.Struct, frozen=True, gc=False):
    """The digests (16 bytes) and flags of a message, without its text."""

    message: CanonicalMessage
    assistant: bool
    media: bool
    loose: bytes
    """Digest of the conversation up to and including this message, without the parts that clients drop or
    strip."""
    strict: bytes
    """Digest of the conversation up to and including this message, exactly as the client spells it."""
    bare: bytes
    """As `loose`, and without the arguments of this message's tool calls."""
    lenient: bytes
    """As `loose`, in the form of the equivalences that have a reason, too; equals it if no message has such a
    form."""
    content: bytes
    """Digest of this message, and of the one before it unless an equal message elsewhere is a copy of it."""


def parse_message(
    raw: bytes, index: int, before: ParsedMessage | None, equivalents: Equivalents = NO_EQUIVALENTS
) -> ParsedMessage:
    """Parse a message of a conversation.

    Args:
        raw: the message as JSON.
        index: its position in the conversation, for errors.
        before: the message before it; None for the first.
        equivalents: those of the conversation's tools and template.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError: it is not a JSON object.
        InvalidMessages: it is not a chat message, or holds too many values to be read.
    """
    if memoryview(raw).nbytes > _COUNTED_FROM_BYTES and values_in(_without_text(raw)) > MOST_VALUES:
        raise InvalidMessages(f"message {index} holds more than {MOST_VALUES} values")
    return digest_message(_parse(raw), index, before, equivalents)


def digest_message(
    message: dict[str, Any], index: int, before: ParsedMessage | None, equivalents: Equivalents
) -> ParsedMessage:
    """As `parse_message`, of a message that is an object. Raises InvalidMessages."""
    own = canonical(message, index, equivalents, before.message.call_ids if before else ())
    loose, strict = (before.loose, before.strict) if before else (NOTHING, NOTHING)
    lenient = before.lenient if before else NOTHING
    exactly = extend(strict, own.strict)
    loosely = exactly if (loose, own.loose) == (strict, own.strict) else extend(loose, own.loose)
    return ParsedMessage(
        own,
        message["role"] == "assistant",
        media_kind(message.get("content")) is not None,
        loosely,
        exactly,
        extend(loose, own.without_arguments) if own.arguments else b"",
        loosely if (lenient, own.lenient) == (loose, own.loose) else extend(lenient, own.lenient),
        extend(b"" if before is None or _is_distinctive(message) else before.message.loose, own.loose),
    )


class _Content(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw(b"")


def _without_text(raw: bytes) -> bytes:
    """A message without its content if that is a text."""
    data, content = bytes(raw), bytes(msgspec.json.decode(raw, type=_Content).content)
    return data.replace(content, b"", 1) if content[:1] == b'"' else data


def _is_distinctive(message: dict[str, Any]) -> bool:
    """Whether an equal message elsewhere is a copy of this one: it is long, or holds tool calls with ids."""
    if message.get("tool_calls"):
        return True
    content = message.get("content")
    if isinstance(content, str):
        return len(content.strip()) >= _DISTINCTIVE_BYTES
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return sum(len(text.strip()) for text in texts if isinstance(text, str)) >= _DISTINCTIVE_BYTES


def _size(raws: Sequence[msgspec.Raw]) -> int:
    return sum(memoryview(raw).nbytes for raw in raws)


class LazyMessages(Sequence[dict[str, Any]]):
    """Messages that are parsed when they are read: in a long history, mostly only the last one."""

    def __init__(self, raws: Sequence[msgspec.Raw]) -> None:
        self._raws = raws
        self._parsed: dict[int, dict[str, Any]] = {}

    @property
    def size(self) -> int:
        """Bytes of the messages."""
        return _size(self._raws)

    def __len__(self) -> int:
        return len(self._raws)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        if position not in self._parsed:
            self._parsed[position] = _parse(self._raws[position])
        return self._parsed[position]


@dataclass
class Conversation:
    """The messages of a request."""

    raws: Sequence[msgspec.Raw]
    """Each message as the client spelled it."""
    messages: Sequence[ParsedMessage]
    equivalents: Equivalents = NO_EQUIVALENTS
    """Those of its tools and template."""

    @cached_property
    def ends(self) -> list[int]:
        """Indexes of the assistant messages that others follow, where a turn may end; the last first."""
        last = len(self.messages) - 1
        return [i for i in range(last - 1, -1, -1) if self.messages[i].assistant]

    @property
    def ends_with_assistant(self) -> bool:
        """Whether no message follows the last assistant message."""
        return bool(self.messages) and self.messages[-1].assistant

    @cached_property
    def media(self) -> bool:
        """Whether a message holds images or other media."""
        return any(message.media for message in self.messages)

    def strict_before(self, index: int) -> bytes:
        """The strict digest of the messages before one."""
        return self.messages[index - 1].strict if index else NOTHING

    def answered(self, message: dict[str, Any]) -> ParsedMessage:
        """The message that was sampled after all others. Raises InvalidMessages."""
        before = self.messages[-1] if self.messages else None
        return digest_message(message, len(self.messages), before, self.equivalents)

    def continued(self, message: dict[str, Any]) -> tuple["Conversation", dict[str, Any]] | None:
        """The conversation without its last message, and that message joined with what was sampled after it.

        Returns:
            None if the last message is no text of an assistant.
        """
        last = _parse(self.raws[-1]) if self.ends_with_assistant else {}
        begun, sampled = last.get("content"), message.get("content") or ""
        if not (isinstance(begun, str) and isinstance(sampled, str)) or last.get("tool_calls"):
            return None
        before = replace(self, raws=self.raws[:-1], messages=self.messages[:-1])
        return before, {**last, **message, "content": begun + sampled}

    def parse(self, first: int = 0) -> list[dict[str, Any]]:
        """The messages from `first` on as objects."""
        return [_parse(raw) for raw in self.raws[first:]]

    def size(self, first: int = 0) -> int:
        """Bytes of the messages from `first` on."""
        return _size(self.raws[first:])

    def json(self, first: int) -> bytes:
        """The messages from `first` on as a JSON array, as they were spelled."""
        return b"[" + b",".join(self.raws[first:]) + b"]"

    def ignored(self, first: int = 0, end: int | None = None) -> list[bytes]:
        """`CanonicalMessage.ignored` of the assistant messages from `first` to before `end`."""
        return [parsed.message.ignored for parsed in self.messages[first:end] if parsed.assistant]


class Scope(msgspec.Struct, frozen=True):
    """The tenant and session of a conversation, its model, and how it is rendered."""

    tenant: str
    """Digest of a verified credential; empty where no credentials are required."""
    session: str | None
    """The client's name of the session; None for conversations without one, whose name the proxy chose."""
    model: str
    """Base model or LoRA adapter."""
    parts: tuple[bytes, ...]
    """See `scope_parts`."""

    def key(self, kind: str, digest: bytes) -> bytes:
        """A key of the store's index: 16 bytes. `kind`: what `digest` is a digest of."""
        key: bytes = self.hasher(kind, digest).digest()
        return key

    def hasher(self, kind: str, digest: bytes = b"") -> Any:
        """blake2b over the scope and a digest, which may be updated with more; see `key`."""
        tenant, session = self.tenant.encode(), (self.session or "").encode()
        lengths = (len(tenant).to_bytes(8, "little"), len(session).to_bytes(8, "little"))
        # a key that only explains a miss leaves out model and rendering
        parts = () if kind == CONTENT else self.parts
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
    # in the form that a template gets: what it does not get changes no rendering
    return (
        start(tools=tools_for_template(rendering.parse_tools())),
        start(template_kwargs=arguments_for_template(rendering.parse_template_kwargs())),
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


def text_entries(scope: Scope, answer: ParsedMessage, ids: bytes) -> list[IndexEntry]:
    """The index entries of a turn: three, or four if its conversation has tool calls.

    Args:
        answer: the assistant's message, see `Conversation.answered`.
        ids: its `ids_digest`.
    """
    cut_off = answer.message.cut_off
    loosely = scope.key(BARE, answer.bare) if cut_off else scope.key(LOOSE, answer.loose)
    exactly, explaining = scope.key(EXACT, answer.strict), scope.key(CONTENT, answer.content)
    entries = [IndexEntry(exactly, ids), IndexEntry(loosely, ids), IndexEntry(explaining)]
    if answer.lenient != answer.loose:
        entries.append(IndexEntry(scope.key(LENIENT, answer.lenient), ids))
    return entries


def text_keys(scope: Scope, message: ParsedMessage) -> list[bytes]:
    """The keys, of each kind in `KINDS`, of a turn that ends at a message."""
    keys = [scope.key(EXACT, message.strict), scope.key(LOOSE, message.loose)]
    return [*keys, scope.key(BARE, message.bare)] if message.bare else keys


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
