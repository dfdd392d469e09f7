"""Reads the sampled choices from an engine's completion, whole or streamed.

Law: evidence can never fail the response. Ids and log-probabilities of an unknown shape are named in
    `SampledChoice.unreadable`, so that the turn is recorded and never trained on; other fields of an unknown
    shape are left out. An error is raised only if the data is not a JSON object or is nested hundreds of
    levels deep.
"""

from collections.abc import MutableSequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from chat_tokenizer import InvalidIds, ids
from tokenproxy.base.evidence import EVIDENCE, OF_ONE_ENGINE, WEIGHTS
from tokenproxy.base.fields import NULL
from tokenproxy.record.completion import Batch, Completion, SampledChoice
from tokenproxy.record.turn import WeightSpan, ids_array
from tokenproxy.record.vocabulary import ABORTED
from tokenproxy.turn import wire
from tokenproxy.turn.lenient import REFUSALS
from tokenproxy.turn.parsing import OddChoice, OddCompletion, OddDelta
from tokenproxy.turn.rest import Rest
from tokenproxy.turn.usual import UsualChunk

_Raw = msgspec.Raw | UnsetType
_OTHER_TEXTS = ("reasoning", "reasoning_content", "refusal")
"""Fields of a message, besides its content, whose text a stream sends in pieces."""
_SAMPLED = ("content", "reasoning", "reasoning_content", "tool_calls")
"""Fields of a message that show that something was sampled."""
_SAID = frozenset({"message", "delta", "text"})
_facts_of = attrgetter(*[fact.name for fact in EVIDENCE])
_NO_FACTS = (UNSET,) * len(EVIDENCE)
_ARRAY_FROM_BYTES = 1024
"""Bytes of an array of ids from which it is converted without objects for ids."""


def read_completion(whole: wire.Completion, sent: bytes = b"", batch: Batch | None = None) -> Completion:
    """Read the sampled choices of a whole completion; an error in its place has none.

    Args:
        sent, batch: see `CompletionReader`.
    """
    reader = CompletionReader(len(whole.choices or ()), sent, batch)
    reader.read(whole)
    completion = reader.rest()
    if (usage := wire.usage_of(whole.usage)) is not None:
        completion.completion_tokens = usage.completion_tokens
    return completion


@dataclass(slots=True)
class _Echo:
    """The prompt as an engine echoed it."""

    sent: bytes
    ids: bytes | None = None
    """The JSON array of ids as the engine wrote it; None if there is none, or it cannot be parsed."""
    packed: bytes | None = None
    """The ids packed, if they had to be parsed."""
    unreadable: str = ""
    """The name of the field, if it cannot be parsed."""

    def read(self, echo: bytes) -> None:
        """Add an echo; null and `[]` are none. Of several choices with one prompt, the first holds it."""
        if echo in (NULL, b"[]") or self.ids is not None:
            return
        try:
            if echo != self.sent:
                self.packed = ids.pack(echo)
            self.ids = echo
        except InvalidIds:
            self.unreadable = "prompt_token_ids"


def holds_more(choice: wire.Choice) -> bool:
    """Whether a piece of a choice holds more than its end."""
    has_ids = wire.is_set(choice.token_ids) and bytes(choice.token_ids or b"") != b"[]"
    return has_ids or bool(choice.delta and choice.delta.sampled) or _facts_of(choice) != _NO_FACTS


def _says(choice: wire.Choice) -> bool:
    """Whether a piece says something that was sampled."""
    if delta := choice.delta:
        return delta.sampled or (isinstance(delta, OddDelta) and bool(delta.more))
    if choice.message:
        message = wire.message_of(choice.message)
        return any(value for name, value in message.items() if name != "role")
    return bool(choice.text) or (isinstance(choice, OddChoice) and bool(_SAID & choice.more.keys()))


class CompletionReader:
    """Collects what was sampled from the chunks of a stream; a whole completion is one chunk.

    Each chunk must hold usage: it shows whether all ids came.
    """

    def __init__(self, expected: int = 1, sent: bytes = b"", batch: Batch | None = None) -> None:
        """Nothing is read yet.

        Args:
            expected: how many choices there will be.
            sent: the prompt that was sent to the engine, as a JSON array; an equal echo is not parsed.
            batch: the prompts of a request of the completions route, where each choice echoes its prompt.
        """
        self.batch = batch
        self.failed = False
        """Whether the engine sent an error in place of a chunk."""
        self.usage_read = False
        """Whether the chunk after the last choice was read, which has no choices."""
        self.ended: list[_Sampled] = []
        """Choices that ended, and that `rest` has not returned yet."""
        self._expected = expected
        self._closed = 0
        """How many choices have ended."""
        self._choices: dict[int, _Sampled] = {}
        self._cached_tokens: int | None = None
        self._odd, self._why_odd = 0, ""
        self._echoes = [_Echo(sent)] if batch is None else [_Echo(prompt) for prompt in batch.prompts]

    def add(self, usual: UsualChunk) -> bool:
        """Add a chunk of the usual shape. Returns False if it must be parsed and read."""
        streamed = self._choices.get(usual.choice)
        if streamed is None or streamed.closed or not usual.field:
            return False
        streamed.texts.setdefault(usual.field, []).append(usual.text)
        if streamed.ids is None:
            streamed.ids = []
        streamed.ids.append(usual.token_id)
        if streamed.logprobs is None:
            streamed.logprobs = []
        streamed.logprobs.append(usual.logprob)
        streamed.usage = usual.usage
        return True

    def read(self, chunk: wire.Completion) -> None:
        """Add a chunk. An error of the engine is skipped."""
        if chunk.error and wire.is_set(chunk.error):
            self.failed = True
            return
        if isinstance(chunk, OddCompletion):
            self._odd += 1
            self._why_odd = chunk.why
        choices = chunk.choices or ()
        if chunk.prompt_token_ids and self.batch is None:
            self._echoes[0].read(bytes(chunk.prompt_token_ids))
        if chunk.usage and self.batch is None:
            self._read_cached(chunk.usage)
        self.usage_read |= not choices and self.complete
        alone = len(choices) == 1
        sure = alone or len({choice.index or 0 for choice in choices}) == len(choices)
        for choice in choices:
            index = choice.index or 0
            streamed = self._choices.get(index)
            if streamed is None:
                streamed = self._choices[index] = _Sampled(SampledChoice(index))
            if streamed.closed:
                continue
            streamed.add(choice)
            if not sure or (choice.index.__class__ is not int and self._expected > 1):
                streamed.mark("index")
            if self.batch is not None and choice.prompt_token_ids:
                self._echo_of(index).read(bytes(choice.prompt_token_ids))
            if alone and chunk.usage:
                streamed.usage = chunk.usage
            if choice.finish_reason:
                streamed.closed = True
                self.ended.append(streamed)
                self._closed += 1

    def _read_cached(self, usage: msgspec.Raw) -> None:
        read = wire.usage_of(usage)
        if read is not None and read.cached_tokens is not None:
            self._cached_tokens = read.cached_tokens

    def progress(self) -> dict[int, int] | None:
        """Number of sampled ids that arrived, by the index of the choice; None if some came without ids."""
        if any(choice.without_ids for choice in self._choices.values()):
            return None
        return {index: len(choice.ids or ()) for index, choice in self._choices.items()}

    def rests(self) -> list[Rest]:
        """What is left of the choices that have not ended; without a prompt where their ids are unknown."""
        found: list[Rest] = []
        for index in range(self._expected):
            choice = self._choices.get(index) or _Sampled(SampledChoice(index))
            if not choice.closed:
                prompt = b"" if choice.without_ids else self._echo_of(index).ids or b""
                found.append(Rest(index, prompt, list(choice.ids or ()), choice.message))
        return found

    def drop_facts(self) -> None:
        """Drop the facts of choices that another engine continues, if a turn of two segments has none."""
        for choice in self._choices.values():
            if not choice.closed:
                choice.drop_facts()

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
        return self._closed >= self._expected

    @property
    def awaits_usage(self) -> bool:
        """Whether all choices have ended, and the next chunk may tell how many prompt ids were cached."""
        told = self.usage_read or self._cached_tokens is not None
        return self.complete and self.batch is None and not (told or self.failed)

    def rest(self, *, ended: bool = False) -> Completion:
        """The choices that were not returned yet; those without a finish reason were broken off.

        Args:
            ended: whether to return only those with one.
        """
        new, self.ended = self.ended, []
        completion = Completion(cached_tokens=None if self.batch else self._cached_tokens)
        completion.odd, completion.why_odd, self._odd = self._odd, self._why_odd, 0
        if self.batch is None:
            (echo,) = self._echoes
            completion.prompt_ids, completion.packed_prompt = echo.ids, echo.packed
        for streamed in self._choices.values():
            if streamed in new or not (ended or streamed.closed):
                echo = self._echo_of(streamed.sampled.index)
                choice = streamed.result(echo)
                choice.prompt_ids = echo.ids if self.batch else None
                completion.choices.append(choice)
        return completion

    def _echo_of(self, choice: int) -> _Echo:
        """The echo of the prompt of a choice, given its index."""
        return self._echoes[self.batch.prompt_of(choice) if self.batch else 0]


@dataclass(eq=False, slots=True)
class _Sampled:
    """A choice, as far as its pieces arrived."""

    sampled: SampledChoice
    closed: bool = False
    """Whether it takes no more pieces, because it ended or was returned."""
    usage: bytes | _Raw = UNSET
    """The tokens so far."""
    ids: MutableSequence[int] | None = None
    logprobs: MutableSequence[float] | None = None
    without_ids: bool = False
    """Whether some of its text arrived without ids."""
    texts: dict[str, list[str]] = field(default_factory=dict)
    _whole: dict[str, Any] | None = None
    """Its message, if that came in one piece."""
    _unreadable: tuple[str, ...] = ()
    _calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    _facts: dict[str, list[msgspec.Raw]] = field(default_factory=dict)
    """The pieces of each fact of `EVIDENCE`."""

    def add(self, choice: wire.Choice) -> None:
        """Append a piece, as the OpenAI SDKs do."""
        if choice.delta:
            self._add_delta(choice.delta)
        elif wire.is_set(choice.message):
            self._whole = wire.message_of(choice.message)
        elif isinstance(choice.text, str):
            self.texts.setdefault("content", []).append(choice.text)
        self._add_ids(choice)
        if choice.logprobs:
            self._add_logprobs(choice.logprobs)
        if choice.finish_reason:
            self.sampled.finish_reason = choice.finish_reason
        if choice.stop_reason and (reason := wire.stop_reason_of(choice)) is not None:
            self.sampled.stop_reason = reason
        if (values := _facts_of(choice)) != _NO_FACTS:
            for fact, value in zip(EVIDENCE, values, strict=True):
                if value:
                    self._facts.setdefault(fact.name, []).append(msgspec.Raw(bytes(value)))
        if isinstance(choice, OddChoice) and "index" in choice.more:
            self.mark("index")

    def drop_facts(self) -> None:
        """See `CompletionReader.drop_facts`."""
        for name in OF_ONE_ENGINE:
            self._facts.pop(name, None)

    def _add_delta(self, delta: wire.Delta) -> None:
        if delta.content.__class__ is str:
            self.texts.setdefault("content", []).append(delta.content)
        for name in _OTHER_TEXTS:
            if isinstance(text := getattr(delta, name), str):
                self.texts.setdefault(name, []).append(text)
        if delta.tool_calls:
            for call in wire.calls_of({"tool_calls": delta.tool_calls}):
                self._add_call(call)

    def _add_ids(self, choice: wire.Choice) -> None:
        try:
            new = self._read_ids(choice.token_ids)
        except REFUSALS:
            self.mark("token_ids")
            return
        if new is None:
            self.without_ids |= _says(choice)
        elif self.ids is None:
            self.ids = new
        else:
            self.ids += new

    def _read_ids(self, data: _Raw) -> MutableSequence[int] | None:
        if not data or self.ids is not None or memoryview(data).nbytes < _ARRAY_FROM_BYTES:
            return wire.ids_of(data)
        array = bytes(data)
        try:
            packed = ids_array(ids.pack_compact(array))
        except InvalidIds:
            return wire.ids_of(data)
        self.sampled.raw_ids = array
        return packed

    def _add_logprobs(self, data: msgspec.Raw) -> None:
        try:
            new = wire.logprobs_of(data)
        except REFUSALS:
            self.mark("logprobs")
            return
        if new is None or (logprobs := new.values) is None:
            return
        if self.logprobs is None:
            self.logprobs = logprobs
        else:
            self.logprobs += logprobs
        if isinstance(new, wire.TokenLogprobs):
            self.sampled.alternatives += new.alternatives

    def mark(self, *unreadable: str) -> None:
        """Name fields of the evidence that could not be read."""
        self._unreadable = tuple(dict.fromkeys((*self._unreadable, *unreadable)))
        self.without_ids |= "token_ids" in unreadable

    def result(self, echo: _Echo) -> SampledChoice:
        """The choice as far as it arrived. Its ids are None if some of its text arrived without ids."""
        self.closed = True
        sampled = self.sampled
        sampled.message = self.message
        if (usage := wire.usage_of(self.usage)) is not None and usage.completion_tokens is not None:
            sampled.counted = usage.completion_tokens
        sampled.finish_reason = sampled.finish_reason or ABORTED
        sampled.unreadable = echo.unreadable or next(iter(self._unreadable), "")
        if not (self.without_ids or (not self.ids and any(map(sampled.message.get, _SAMPLED)))):
            sampled.ids = self.ids  # else text came without ids: what was sampled is unknown
        if "logprobs" not in self._unreadable:
            sampled.logprobs = self.logprobs
        if self._facts:
            facts = {fact.name: fact.read(self._facts.get(fact.name, ())) for fact in EVIDENCE}
            sampled.facts = {name: value for name, value in facts.items() if value is not None}
            spans = sampled.facts.get(WEIGHTS, ())
            sampled.weight_versions = tuple([WeightSpan(str(s.version), s.start, s.end) for s in spans])
        return sampled

    def _add_call(self, piece: wire.CallPiece) -> None:
        call = self._calls.setdefault(piece.position, {"type": "function", "function": {}})
        function = call["function"]
        if piece.id:  # the first counts: some engines repeat it, or make a new one for each piece
            call.setdefault("id", piece.id)
        if piece.name:
            function.setdefault("name", piece.name)
        if piece.arguments is not None:
            function["arguments"] = function.get("arguments", "") + piece.arguments

    @property
    def message(self) -> dict[str, Any]:
        """The message so far."""
        if self._whole is not None:
            return self._whole
        message: dict[str, Any] = {"role": "assistant", "content": None}
        message |= {name: "".join(texts) for name, texts in self.texts.items()}
        if self._calls:
            message["tool_calls"] = [call for _, call in sorted(self._calls.items())]
        return message
