"""Reads the sampled choices from an engine's completion, whole or streamed.

Law: evidence can never fail the response. Ids and log-probabilities of an unknown shape are named in
    `SampledChoice.unreadable`, so that the turn is recorded and never trained on; other fields of an unknown
    shape are left out. An error is raised only if the data is not a JSON object or is nested hundreds of
    levels deep.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, cast

from proxy.fields import NULL, is_null
from proxy.history.completion import Batch, Completion, SampledChoice
from proxy.history.turn import WeightSpan, pack_ids
from proxy.history.vocabulary import ABORTED
from proxy.turn.alternatives import read_alternatives
from proxy.turn.chunk import ABSENT, Choice, Chunk, completion_tokens, decode_ids, parse_chunk
from proxy.turn.engine_json import CUT, CUT_FROM_BYTES, REFUSALS, cut_prompt
from proxy.turn.usual_chunk import Piece, UsualChunk

DONE = b"[DONE]"
"""The data of the event that ends a stream; it is not a chunk."""

_TEXTS = frozenset({"content", "reasoning", "reasoning_content", "refusal"})
"""Fields of a message whose text a stream sends in pieces."""


def read_completion(body: bytes, sent: bytes = b"", batch: Batch | None = None) -> Completion:
    """Read the sampled choices of a whole completion.

    Args:
        sent: the prompt that was sent to the engine, as a JSON array; an equal echo is not parsed.
        batch: the prompts of a request of the completions route, where each choice echoes its prompt.

    Raises:
        EngineBroken: the body is not a JSON object.
    """
    whole, prompt = _parse(body, batch)
    echoes = _Echoes(sent, batch)
    echoes.read(prompt)
    completion = Completion(
        echoes.ids,
        completion_tokens=whole.counted,
        cached_tokens=None if batch is not None or whole.usage is None else whole.usage.cached_tokens,
        packed_prompt=echoes.packed,
    )
    alternatives = read_alternatives(body)
    for choice, index, sure in _numbered(whole.choices or []):
        sampled = SampledChoice(index, choice.whole_message(), alternatives=alternatives.get(index, []))
        _add(choice, sampled)
        if not sampled.ids and _holds_text(sampled.message):
            sampled.ids = None  # text without ids: what was sampled is unknown
        echo = echoes.of_choice(index, choice)
        sampled.unreadable = _first(echo.unreadable, choice.unreadable, () if sure else ("index",))
        if batch is not None:
            sampled.prompt_ids = echo.ids
        completion.choices.append(sampled)
    return completion


def _parse(data: bytes, batch: Batch | None) -> tuple[Chunk, bytes]:
    """A completion or chunk, and the prompt that it echoes, as JSON. Raises EngineBroken."""
    if batch is not None:
        return parse_chunk(data), NULL
    prompt, rest = cut_prompt(data)
    chunk = parse_chunk(rest)
    if prompt is not None and bytes(chunk.prompt_token_ids) != CUT:
        prompt, chunk = None, parse_chunk(data)  # the array belongs to something inside
    if prompt is not None:
        return chunk, prompt
    return chunk, NULL if chunk.prompt_token_ids is ABSENT else bytes(chunk.prompt_token_ids)


def _holds_text(message: dict[str, Any]) -> bool:
    """Whether the message shows that something was sampled."""
    return any(message.get(name) for name in ("content", "reasoning", "reasoning_content", "tool_calls"))


def _numbered(choices: list[Choice]) -> Iterator[tuple[Choice, int, bool]]:
    """Each choice with a unique index, and whether that index is certainly the engine's."""
    claimed = {choice.index for choice in choices}
    free = (index for index in count() if index not in claimed)
    taken: set[int] = set()
    for choice in choices:
        if choice.index is None or choice.index in taken:
            yield choice, next(free), len(choices) == 1
        else:
            taken.add(choice.index)
            yield choice, choice.index, True


@dataclass(slots=True)
class _Echo:
    """The prompt as an engine echoed it."""

    sent: bytes
    ids: bytes | None = None
    """The JSON array of ids as the engine wrote it; None if there is none, or it cannot be parsed."""
    packed: bytes | None = None
    """The ids packed, if they had to be parsed and are few."""
    unreadable: tuple[str, ...] = ()

    def read(self, ids: bytes) -> None:
        """Add an echo; null counts as no echo."""
        if ids == NULL:
            return
        try:
            parsed = decode_ids(ids) if ids != self.sent else None
            # numpy packs many ids faster, on a thread
            self.packed = pack_ids(parsed) if parsed is not None and len(ids) < CUT_FROM_BYTES else None
            self.ids = ids
        except REFUSALS:
            self.unreadable = ("prompt_token_ids",)


class _Echoes:
    """The prompts of a request as an engine echoed them."""

    def __init__(self, sent: bytes, batch: Batch | None) -> None:
        """`batch` is None where one echo belongs to all choices."""
        self._batch = batch
        self._prompts = [_Echo(prompt) for prompt in (batch.prompts if batch is not None else (sent,))]

    @property
    def ids(self) -> bytes | None:
        """The echo that belongs to all choices."""
        return self._prompts[0].ids if self._batch is None else None

    @property
    def packed(self) -> bytes | None:
        """The ids of the echo that belongs to all choices, packed; None if they were not."""
        return self._prompts[0].packed if self._batch is None else None

    def read(self, ids: bytes) -> None:
        """Add an echo that belongs to all choices; null counts as no echo."""
        self._prompts[0].read(ids)

    def of_choice(self, index: int, choice: Choice | None = None) -> _Echo:
        """The echo of a choice's prompt, after `choice` was added: the first of its choices holds it."""
        if self._batch is None:
            return self._prompts[0]
        echo = self._prompts[self._batch.prompt_of(index)]
        if choice is not None and echo.ids is None and not is_null(choice.prompt_token_ids):
            echo.read(bytes(choice.prompt_token_ids))
        return echo


@dataclass
class StreamReader:
    """Collects what was sampled from the chunks of a stream, one after the other.

    The stream must hold usage in each chunk: it shows whether all ids came.
    """

    expected: int = 1
    """How many choices there will be."""
    sent: bytes = b""
    """The prompt that was sent to the engine, as a JSON array; an equal echo is not parsed."""
    batch: Batch | None = None
    """See `read_completion`."""
    failed: bool = field(init=False, default=False)
    """Whether the engine sent an error in place of a chunk."""
    _echoes: _Echoes = field(init=False)
    _choices: dict[int, "_StreamedChoice"] = field(init=False, default_factory=dict)
    _ended: int = field(init=False, default=0)
    _cached_tokens: int | None = field(init=False, default=None)
    _usage_read: bool = field(init=False, default=False)
    """Whether the chunk after the last choice was read, which has no choices."""
    _new: list["_StreamedChoice"] = field(init=False, default_factory=list)
    """Choices that ended and were not returned yet."""

    def __post_init__(self) -> None:
        self._echoes = _Echoes(self.sent, self.batch)

    def add(self, chunk: UsualChunk) -> bool:
        """Add a chunk of the usual shape. Returns False if it must be read."""
        piece = chunk.piece()
        if piece is None:
            return False
        streamed = self._choices.get(piece.choice)
        if streamed is None or streamed.closed:
            return False
        streamed.add_piece(piece)
        return True

    def read(self, data: bytes) -> None:
        """Add the data of an event. An error of the engine is skipped.

        Raises:
            EngineBroken: the data is not a JSON object.
        """
        chunk, prompt = _parse(data, self.batch)
        if chunk.error is not ABSENT and not is_null(chunk.error):
            self.failed = True
            return
        self._echoes.read(prompt)
        choices = chunk.choices or []
        self._read_cached(chunk)
        alternatives = read_alternatives(data)
        alone = len(choices) == 1
        sure = alone or len({choice.index or 0 for choice in choices}) == len(choices)
        for choice in choices:
            index = choice.index or 0
            streamed = self._choices.get(index)
            if streamed is None:
                streamed = self._choices[index] = _StreamedChoice(SampledChoice(index))
            if streamed.closed:
                continue
            streamed.add(choice)
            streamed.sampled.alternatives += alternatives.get(index, ())
            self._echoes.of_choice(index, choice)
            if not sure or (choice.index is None and self.expected > 1):
                streamed.mark(("index",))
            if alone and (counted := chunk.counted) is not None:
                streamed.sampled.counted, streamed.usage = counted, None
            if choice.finish_reason:
                streamed.closed = True
                self._new.append(streamed)
                self._ended += 1

    def progress(self) -> dict[int, int] | None:
        """Number of sampled ids that arrived, by the index of the choice; None if some came without ids."""
        if any(choice.without_ids for choice in self._choices.values()):
            return None
        return {index: len(choice.sampled.ids or ()) for index, choice in self._choices.items()}

    def _read_cached(self, chunk: Chunk) -> None:
        if self.batch is None and chunk.usage is not None and chunk.usage.cached_tokens is not None:
            self._cached_tokens = chunk.usage.cached_tokens
        self._usage_read |= self.complete and not chunk.choices

    @property
    def complete(self) -> bool:
        """Whether all choices have ended."""
        return self._ended >= self.expected

    @property
    def awaits_usage(self) -> bool:
        """Whether all choices have ended, and the next chunk may tell how many prompt ids were cached."""
        told = self._usage_read or self._cached_tokens is not None
        return self.complete and self.batch is None and not (told or self.failed)

    @property
    def has_ended(self) -> bool:
        """Whether a choice has ended since the last call of `ended`."""
        return bool(self._new)

    def ended(self) -> Completion:
        """The choices that ended since the last call."""
        new, self._new = self._new, []
        return self._completion(new)

    def rest(self) -> Completion:
        """The choices that were not returned yet; those without a finish reason were broken off."""
        new, self._new = self._new, []
        return self._completion(each for each in self._choices.values() if each in new or not each.closed)

    def _completion(self, choices: Iterable["_StreamedChoice"]) -> Completion:
        results = []
        for choice in choices:
            echo = self._echoes.of_choice(choice.sampled.index)
            results.append(choice.result(echo))
            if self.batch is not None:
                results[-1].prompt_ids = echo.ids
        return Completion(
            self._echoes.ids,
            results,
            cached_tokens=self._cached_tokens,
            packed_prompt=self._echoes.packed,
        )


@dataclass(eq=False, slots=True)
class _StreamedChoice:
    """A choice that comes in pieces."""

    sampled: SampledChoice
    closed: bool = False
    """Whether it takes no more pieces, because it ended or was returned."""
    usage: bytes | None = None
    """The tokens so far, from a later chunk than `sampled.counted`."""
    _unreadable: tuple[str, ...] = ()
    _without_ids: bool = False
    _texts: dict[str, list[str]] = field(default_factory=dict)
    _calls: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def without_ids(self) -> bool:
        """Whether some of its text arrived without ids."""
        return self._without_ids or "token_ids" in self._unreadable

    def add(self, choice: Choice) -> None:
        """Append a piece, as the OpenAI SDKs do."""
        delta = choice.new_text()
        for name, value in delta.items():
            if name in _TEXTS and isinstance(value, str):
                self._texts.setdefault(name, []).append(value)
            elif name == "tool_calls" and isinstance(value, list):
                self._add_calls(value)
        if choice.token_ids is None and any(value for name, value in delta.items() if name != "role"):
            self._without_ids = True
        self.mark(choice.unreadable)
        _add(choice, self.sampled)

    def add_piece(self, piece: Piece) -> None:
        """Append one sampled id."""
        sampled = self.sampled
        if sampled.ids is None:
            sampled.ids = []
        if sampled.logprobs is None:
            sampled.logprobs = []
        self._texts.setdefault("content", []).append(piece.content)
        cast("list[int]", sampled.ids).append(piece.token_id)
        cast("list[float]", sampled.logprobs).append(piece.logprob)
        self.usage = piece.usage

    def mark(self, unreadable: tuple[str, ...]) -> None:
        """Name fields of the evidence that could not be read."""
        if unreadable:
            self._unreadable = tuple(dict.fromkeys((*self._unreadable, *unreadable)))

    def result(self, echo: _Echo) -> SampledChoice:
        """The choice as far as it arrived. Its ids are None if some of its text arrived without ids."""
        self.closed = True
        sampled = self.sampled
        sampled.message = self._message()
        if self.usage is not None and (counted := completion_tokens(self.usage)) is not None:
            sampled.counted = counted
        sampled.finish_reason = sampled.finish_reason or ABORTED
        sampled.unreadable = _first(echo.unreadable, self._unreadable)
        if self.without_ids:
            sampled.ids = None
        if "logprobs" in self._unreadable:
            sampled.logprobs = None
        return sampled

    def _add_calls(self, pieces: list[Any]) -> None:
        for position, piece in enumerate(pieces):
            if not isinstance(piece, dict):
                continue
            index = piece.get("index")
            index = index if type(index) is int else position
            call = self._calls.setdefault(index, {"type": "function", "function": {}})
            for name in ("id", "type"):
                if _is_text(piece.get(name)):
                    call[name] = piece[name]
            function = piece.get("function")
            if not isinstance(function, dict):
                continue
            if _is_text(function.get("name")):
                call["function"]["name"] = function["name"]
            if isinstance(arguments := function.get("arguments"), str):
                call["function"]["arguments"] = call["function"].get("arguments", "") + arguments

    def _message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None}
        message |= {name: "".join(texts) for name, texts in self._texts.items()}
        if self._calls:
            message["tool_calls"] = [call for _, call in sorted(self._calls.items())]
        return message


def _add(choice: Choice, sampled: SampledChoice) -> None:
    """Append the ids, log-probabilities and finish reason of a piece."""
    if choice.token_ids is not None:
        sampled.ids = cast("list[int]", sampled.ids or [])
        sampled.ids += choice.token_ids
    if choice.logprobs is not None and (logprobs := choice.logprobs.values()) is not None:
        sampled.logprobs = cast("list[float]", sampled.logprobs or [])
        sampled.logprobs += logprobs
    sampled.finish_reason = choice.finish_reason or sampled.finish_reason
    if choice.stop_reason is not None:
        sampled.stop_reason = choice.stop_reason
    sampled.routed_experts = choice.routed_experts or sampled.routed_experts
    if choice.sampling_mask is not None:
        sampled.sampling_mask = sampled.sampling_mask or []
        sampled.sampling_mask += choice.sampling_mask
    for span in choice.weight_versions or ():
        sampled.weight_versions += (WeightSpan(str(span.version), span.start, span.end),)


def _first(*names: tuple[str, ...]) -> str:
    return next((name for some in names for name in some), "")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""
