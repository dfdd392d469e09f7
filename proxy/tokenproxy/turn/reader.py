"""Reads the sampled choices from an engine's completion, whole or streamed.

Law: evidence can never fail the response. Ids and log-probabilities of an unknown shape are named in
    `SampledChoice.unreadable`, so that the turn is recorded and never trained on; other fields of an unknown
    shape are left out. An error is raised only if the data is not a JSON object or is nested hundreds of
    levels deep.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from chat_tokenizer import InvalidIds, ids
from tokenproxy.base.fields import NULL, is_null
from tokenproxy.record.completion import Batch, Completion, SampledChoice
from tokenproxy.record.turn import WeightSpan, pack_ids
from tokenproxy.record.vocabulary import ABORTED
from tokenproxy.turn import wire
from tokenproxy.turn.parsing import Parsed
from tokenproxy.turn.rest import Rest
from tokenproxy.turn.usual_chunk import Piece

_PACKED_FROM_BYTES = 2048
"""Bytes of an echoed prompt from which numpy packs it faster than ids are made of it one by one."""
_TEXTS = frozenset({"content", "reasoning", "reasoning_content", "refusal"})
"""Fields of a message whose text a stream sends in pieces."""


def read_completion(parsed: Parsed, sent: bytes = b"", batch: Batch | None = None) -> Completion:
    """Read the sampled choices of a whole completion; an error in its place has none.

    Args:
        sent, batch: see `CompletionReader`.
    """
    whole, choices = parsed.completion, parsed.completion.choices or ()
    usage = whole.usage or wire.Usage()
    echoes = [_Echo(prompt) for prompt in (batch.prompts if batch else (sent,))]
    completion = Completion(completion_tokens=usage.completion_tokens)
    if whole.error is not wire.ABSENT and not is_null(whole.error):
        return completion
    if batch is None:
        echoes[0].read(bytes(whole.prompt_token_ids))
        completion.cached_tokens = usage.cached_tokens
        completion.prompt_ids, completion.packed_prompt = echoes[0].ids, echoes[0].packed
    else:
        for choice in choices:
            echoes[batch.prompt_of(choice.index or 0)].read(bytes(choice.prompt_token_ids))
    sampled: dict[int, SampledChoice] = {}
    for choice in choices:
        index = choice.index or 0
        echo = echoes[batch.prompt_of(index) if batch else 0]
        if index not in sampled:
            sampled[index] = _sampled(choice, echo)
            sampled[index].prompt_ids = echo.ids if batch else None
    completion.choices = list(sampled.values())
    if len(choices) == 1:
        (only,) = completion.choices
        only.counted, only.raw_ids = usage.completion_tokens, parsed.cut.ids or b""
        return completion
    for choice in choices:  # one choice needs no index
        first = sampled[choice.index or 0]
        if choice.index is None or len(sampled) < len(choices):
            first.unreadable = first.unreadable or "index"
    return completion


def _sampled(choice: wire.Choice, echo: "_Echo") -> SampledChoice:
    """A choice of a whole completion."""
    message, ids, logprobs = choice.message, choice.token_ids, choice.logprobs
    if message is None:
        texts = {name: text for name, text in choice.said.items() if name in _TEXTS and isinstance(text, str)}
        message = {"role": "assistant", "content": None, **texts}
    if not ids and _holds_text(message):
        ids = None  # text without ids: what was sampled is unknown
    sampled = SampledChoice(choice.index or 0, message, ids)
    sampled.finish_reason = choice.finish_reason or ABORTED
    sampled.stop_reason = choice.stop_reason
    sampled.routed_experts = choice.routed_experts or None
    sampled.sampling_mask = choice.sampling_mask
    sampled.weight_versions = _weight_spans(choice)
    sampled.unreadable = next(iter((*echo.unreadable, *choice.unreadable)), "")
    values = None if logprobs is None else logprobs.values
    if values is not None and isinstance(logprobs, wire.TokenLogprobs):
        sampled.alternatives = logprobs.alternatives
    sampled.logprobs = None if "logprobs" in choice.unreadable else values
    return sampled


@dataclass(slots=True)
class _Echo:
    """The prompt as an engine echoed it."""

    sent: bytes
    ids: bytes | None = None
    """The JSON array of ids as the engine wrote it; None if there is none, or it cannot be parsed."""
    packed: bytes | None = None
    """The ids packed, if they had to be parsed."""
    unreadable: tuple[str, ...] = ()

    def read(self, echo: bytes) -> None:
        """Add an echo. Null counts as none; of several choices with one prompt, the first holds it."""
        if echo == NULL or self.ids is not None:
            return
        try:
            if echo != self.sent and len(echo) < _PACKED_FROM_BYTES:
                self.packed = pack_ids(wire.decode_ids(echo))
            elif echo != self.sent:
                self.packed = ids.pack(echo)
            self.ids = echo
        except (*wire.REFUSALS, InvalidIds):
            self.unreadable = ("prompt_token_ids",)


@dataclass
class CompletionReader:
    """Collects what was sampled from the chunks of a stream.

    Each chunk must hold usage: it shows whether all ids came.
    """

    expected: int = 1
    """How many choices there will be."""
    sent: bytes = b""
    """The prompt that was sent to the engine, as a JSON array; an equal echo is not parsed."""
    batch: Batch | None = None
    """The prompts of a request of the completions route, where each choice echoes its prompt."""
    failed: bool = field(init=False, default=False)
    """Whether the engine sent an error in place of a chunk."""
    _echoes: list[_Echo] = field(init=False)
    """Of each prompt."""
    _choices: dict[int, "_StreamedChoice"] = field(init=False, default_factory=dict)
    _ended: int = field(init=False, default=0)
    _cached_tokens: int | None = field(init=False, default=None)
    usage_read: bool = field(init=False, default=False)
    """Whether the chunk after the last choice was read, which has no choices."""
    _new: list["_StreamedChoice"] = field(init=False, default_factory=list)
    """Choices that ended and were not returned yet."""

    def __post_init__(self) -> None:
        self._echoes = [_Echo(prompt) for prompt in (self.batch.prompts if self.batch else (self.sent,))]

    def add(self, piece: Piece) -> bool:
        """Add a chunk of the usual shape. Returns False if it must be read."""
        streamed = self._choices.get(piece.choice)
        if streamed is None or streamed.closed:
            return False
        streamed.add_piece(piece)
        return True

    def read(self, chunk: wire.Completion) -> None:
        """Add a chunk. An error of the engine is skipped."""
        if chunk.error is not wire.ABSENT and not is_null(chunk.error):
            self.failed = True
            return
        choices, usage = chunk.choices or (), chunk.usage
        if self.batch is None and chunk.prompt_token_ids is not wire.ABSENT:
            self._echoes[0].read(bytes(chunk.prompt_token_ids))
        if usage is not None and self.batch is None and usage.cached_tokens is not None:
            self._cached_tokens = usage.cached_tokens
        self.usage_read |= self.complete and not choices
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
            if self.batch is not None and choice.prompt_token_ids is not wire.ABSENT:
                self._echo_of(index).read(bytes(choice.prompt_token_ids))
            if not sure or (choice.index is None and self.expected > 1):
                streamed.mark(("index",))
            if alone and usage is not None and usage.completion_tokens is not None:
                streamed.sampled.counted, streamed.usage = usage.completion_tokens, None
            if choice.finish_reason:
                streamed.closed = True
                self._new.append(streamed)
                self._ended += 1

    def progress(self) -> dict[int, int] | None:
        """Number of sampled ids that arrived, by the index of the choice; None if some came without ids."""
        if any(choice.without_ids for choice in self._choices.values()):
            return None
        return {index: len(choice.ids or ()) for index, choice in self._choices.items()}

    def rests(self) -> list[Rest]:
        """What is left of the choices that have not ended; without a prompt where their ids are unknown."""
        found: list[Rest] = []
        for index in range(self.expected):
            choice = self._choices.get(index) or _StreamedChoice(SampledChoice(index))
            if not choice.closed:
                prompt = b"" if choice.without_ids else self._echo_of(index).ids or b""
                found.append(Rest(index, prompt, list(choice.ids or ()), choice.message))
        return found

    @property
    def prompt(self) -> bytes:
        """The prompt of the first choice as a JSON array of ids; empty if it did not arrive."""
        return self._echoes[0].ids or b""

    @property
    def sampled(self) -> int:
        """Number of sampled ids that arrived, in all choices."""
        return sum(len(choice.ids or ()) for choice in self._choices.values())

    @property
    def complete(self) -> bool:
        """Whether all choices have ended."""
        return self._ended >= self.expected

    @property
    def awaits_usage(self) -> bool:
        """Whether all choices have ended, and the next chunk may tell how many prompt ids were cached."""
        told = self.usage_read or self._cached_tokens is not None
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
            echo = self._echo_of(choice.sampled.index)
            results.append(choice.result(echo))
            if self.batch is not None:
                results[-1].prompt_ids = echo.ids
        if self.batch is not None:
            return Completion(None, results)
        (echo,) = self._echoes
        return Completion(echo.ids, results, cached_tokens=self._cached_tokens, packed_prompt=echo.packed)

    def _echo_of(self, choice: int) -> _Echo:
        """The echo of the prompt of a choice, given its index."""
        return self._echoes[self.batch.prompt_of(choice) if self.batch else 0]


@dataclass(eq=False, slots=True)
class _StreamedChoice:
    """A choice that comes in pieces."""

    sampled: SampledChoice
    closed: bool = False
    """Whether it takes no more pieces, because it ended or was returned."""
    usage: bytes | None = None
    """The tokens so far, from a later chunk than `sampled.counted`."""
    ids: list[int] | None = None
    logprobs: list[float] | None = None
    _unreadable: tuple[str, ...] = ()
    _without_ids: bool = False
    _texts: dict[str, list[str]] = field(default_factory=dict)
    _calls: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def without_ids(self) -> bool:
        """Whether some of its text arrived without ids."""
        return self._without_ids or "token_ids" in self._unreadable

    def add(self, choice: wire.Choice) -> None:
        """Append a piece, as the OpenAI SDKs do."""
        delta = choice.said
        for name, value in delta.items():
            if name in _TEXTS and isinstance(value, str):
                self._texts.setdefault(name, []).append(value)
        for call in wire.calls_of(delta):
            self._add_call(call)
        if choice.token_ids is None and any(value for name, value in delta.items() if name != "role"):
            self._without_ids = True
        self.mark(choice.unreadable)
        sampled = self.sampled
        if choice.token_ids is not None:
            self.ids = self.ids or []
            self.ids += choice.token_ids
        if choice.logprobs is not None and (logprobs := choice.logprobs.values) is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += logprobs
            if isinstance(choice.logprobs, wire.TokenLogprobs):
                sampled.alternatives += choice.logprobs.alternatives
        sampled.finish_reason = choice.finish_reason or sampled.finish_reason
        if choice.stop_reason is not None:
            sampled.stop_reason = choice.stop_reason
        sampled.routed_experts = choice.routed_experts or sampled.routed_experts
        if choice.sampling_mask is not None:
            sampled.sampling_mask = sampled.sampling_mask or []
            sampled.sampling_mask += choice.sampling_mask
        sampled.weight_versions += _weight_spans(choice)

    def add_piece(self, piece: Piece) -> None:
        """Append one sampled id."""
        if self.ids is None:
            self.ids = []
        if self.logprobs is None:
            self.logprobs = []
        self._texts.setdefault(piece.field, []).append(piece.text)
        self.ids.append(piece.token_id)
        self.logprobs.append(piece.logprob)
        self.usage = piece.usage

    def mark(self, unreadable: tuple[str, ...]) -> None:
        """Name fields of the evidence that could not be read."""
        if unreadable:
            self._unreadable = tuple(dict.fromkeys((*self._unreadable, *unreadable)))

    def result(self, echo: _Echo) -> SampledChoice:
        """The choice as far as it arrived. Its ids are None if some of its text arrived without ids."""
        self.closed = True
        sampled = self.sampled
        sampled.message = self.message
        if self.usage is not None and (counted := wire.completion_tokens(self.usage)) is not None:
            sampled.counted = counted
        sampled.finish_reason = sampled.finish_reason or ABORTED
        sampled.unreadable = next(iter((*echo.unreadable, *self._unreadable)), "")
        if not (self.without_ids or (not self.ids and _holds_text(sampled.message))):
            sampled.ids = self.ids  # else text came without ids: what was sampled is unknown
        if "logprobs" not in self._unreadable:
            sampled.logprobs = self.logprobs
        return sampled

    def _add_call(self, piece: wire.CallPiece) -> None:
        call = self._calls.setdefault(piece.position, {"type": "function", "function": {}})
        function = call["function"]
        if piece.id:
            call["id"] = piece.id
        if piece.name:
            function["name"] = piece.name
        if piece.arguments is not None:
            function["arguments"] = function.get("arguments", "") + piece.arguments

    @property
    def message(self) -> dict[str, Any]:
        """The message so far."""
        message: dict[str, Any] = {"role": "assistant", "content": None}
        message |= {name: "".join(texts) for name, texts in self._texts.items()}
        if self._calls:
            message["tool_calls"] = [call for _, call in sorted(self._calls.items())]
        return message


def _weight_spans(choice: wire.Choice) -> tuple[WeightSpan, ...]:
    spans = choice.weight_versions or ()
    return tuple([WeightSpan(str(span.version), span.start, span.end) for span in spans])


def _holds_text(message: dict[str, Any]) -> bool:
    """Whether the message shows that something was sampled."""
    return any(message.get(name) for name in ("content", "reasoning", "reasoning_content", "tool_calls"))
