"""Reads what was sampled out of an engine's chat completion, whole or streamed.

Law: evidence can never fail the answer. Ids and log-probabilities of an unknown shape are named in
`SampledChoice.unreadable`, so that the turn is recorded and never trained on; other fields of an unknown
shape are left out. Only what is no JSON object, or nested hundreds of levels deep, is an error.

A body is decoded into typed structs. One that does not fit them, or that msgspec refuses, is read a second
time, field by field.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Annotated, Any

import msgspec

from proxy.fields import NULL, is_null
from proxy.history.completion import Completion, SampledChoice
from proxy.history.turn import WeightSpan
from proxy.history.vocabulary import ABORTED
from proxy.turn.engine_json import (
    CUT,
    REFUSALS,
    cut_prompt,
    dump,
    encodable,
    no_completion,
    parse_leniently,
)

DONE = b"[DONE]"
"""The data of the event that ends a stream; no chunk."""
NO_REASON = "unknown"
"""The finish reason of a choice that ended with one of an unknown shape."""

_NULL = msgspec.Raw(NULL)
_TEXTS = frozenset({"content", "reasoning", "reasoning_content", "refusal"})
"""Fields of a message that are streamed in pieces of text."""

_Id = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""Ids are stored as 32-bit integers."""
_Index = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]
"""The id of a turn has four hexadecimal digits for it."""
_StopReason = str | Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class _Logprob(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Logprob] | None = None


class _Span(msgspec.Struct, gc=False):
    version: str | int
    start: _Id
    end: _Id


class _Usage(msgspec.Struct, gc=False):
    completion_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None


class _Choice(msgspec.Struct):
    """What is read of a choice, or of a piece of one."""

    index: _Index | None = None
    message: dict[str, Any] | None = None
    delta: dict[str, Any] | None = None
    token_ids: list[_Id] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: _StopReason | None = None
    routed_experts: str | None = None
    weight_versions: list[_Span] | None = None

    @property
    def unreadable(self) -> tuple[str, ...]:
        """Names of the fields of the evidence that could not be read."""
        return ()


class _OddChoice(_Choice, kw_only=True):
    """A choice that was read field by field. Never decoded, so that `odd` is no field of the JSON."""

    odd: tuple[str, ...]

    @property
    def unreadable(self) -> tuple[str, ...]:
        return self.odd


class _Chunk(msgspec.Struct):
    """What is read of a whole completion, or of a chunk of a stream."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    prompt_token_ids: msgspec.Raw = _NULL
    error: msgspec.Raw = _NULL

    @property
    def counted(self) -> int | None:
        """The number of sampled ids as the engine counted them."""
        return None if self.usage is None else self.usage.completion_tokens


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_decode_ids = msgspec.json.Decoder(list[_Id]).decode


def read_completion(body: bytes, sent: bytes = b"") -> Completion:
    """What was sampled in a whole completion.

    Args:
        sent: the prompt that the engine was given, as a JSON array; an equal echo is not parsed.

    Raises:
        EngineBroken: the body is no JSON object.
    """
    prompt, rest = cut_prompt(body)
    whole = _parse(rest)
    if prompt is not None and bytes(whole.prompt_token_ids) != CUT:
        prompt, whole = None, _parse(body)  # the array belongs to something inside the completion
    echo = _Echo(sent)
    echo.read(bytes(whole.prompt_token_ids) if prompt is None else prompt)
    completion = Completion(echo.ids, completion_tokens=whole.counted)
    for choice, index, sure in _numbered(whole.choices or []):
        sampled = SampledChoice(index, choice.message or {})
        _add(choice, sampled)
        if not sampled.ids and _holds_text(sampled.message):
            sampled.ids = None  # text without ids: what was sampled is unknown
        sampled.unreadable = _first(echo.unreadable, choice.unreadable, () if sure else ("index",))
        completion.choices.append(sampled)
    return completion


def _holds_text(message: dict[str, Any]) -> bool:
    """Whether something was sampled, as the message tells."""
    return any(message.get(name) for name in ("content", "reasoning", "reasoning_content", "tool_calls"))


def _numbered(choices: list[_Choice]) -> Iterator[tuple[_Choice, int, bool]]:
    """Choices, each with an index of its own, and whether that is certainly the engine's."""
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
    """A JSON array of ids as the engine wrote it; None if there is none that can be read."""
    unreadable: tuple[str, ...] = ()

    def read(self, ids: bytes) -> None:
        """Take in an echo; null is none."""
        if ids == NULL:
            return
        try:
            if ids != self.sent:
                _decode_ids(ids)
            self.ids = ids
        except REFUSALS:
            self.unreadable = ("prompt_token_ids",)


@dataclass
class StreamReader:
    """Collects what was sampled from the chunks of a stream, one after the other.

    The stream must hold usage in each chunk: it shows whether all ids came.
    """

    expected: int = 1
    """How many choices there will be."""
    sent: bytes = b""
    """The prompt that the engine was given, as a JSON array; an equal echo is not parsed."""
    _echo: _Echo = field(init=False)
    _choices: dict[int, "_StreamedChoice"] = field(init=False, default_factory=dict)
    _ended: int = field(init=False, default=0)
    _new: list["_StreamedChoice"] = field(init=False, default_factory=list)
    """Those that ended and were not returned yet."""

    def __post_init__(self) -> None:
        self._echo = _Echo(self.sent)

    def read(self, data: bytes) -> None:
        """Take in the data of an event. An error of the engine is passed over.

        Raises:
            EngineBroken: the data is no JSON object.
        """
        chunk = _parse(data)
        if not is_null(chunk.error):
            return
        self._echo.read(bytes(chunk.prompt_token_ids))
        choices = chunk.choices or []
        alone = len(choices) == 1
        sure = alone or len({choice.index or 0 for choice in choices}) == len(choices)
        for choice in choices:
            index = choice.index or 0
            streamed = self._choices.get(index)
            if streamed is None:
                streamed = self._choices[index] = _StreamedChoice(SampledChoice(index))
            if streamed.returned:
                continue
            streamed.add(choice)
            if not sure or (choice.index is None and self.expected > 1):
                streamed.mark(("index",))
            if alone and (counted := chunk.counted) is not None:
                streamed.sampled.counted = counted
            if choice.finish_reason and streamed not in self._new:
                self._new.append(streamed)
                self._ended += 1

    @property
    def complete(self) -> bool:
        """Whether all choices have ended."""
        return self._ended >= self.expected

    def ended(self) -> Completion:
        """The choices that ended since this was asked last."""
        new, self._new = self._new, []
        return self._completion(new)

    def rest(self) -> Completion:
        """The choices that were not returned yet; one without an end was broken off."""
        self._new = []
        return self._completion(choice for choice in self._choices.values() if not choice.returned)

    def _completion(self, choices: Iterable["_StreamedChoice"]) -> Completion:
        return Completion(self._echo.ids, [choice.result(self._echo) for choice in choices])


@dataclass(eq=False, slots=True)
class _StreamedChoice:
    """A choice that comes in pieces."""

    sampled: SampledChoice
    returned: bool = False
    _unreadable: tuple[str, ...] = ()
    _without_ids: bool = False
    _texts: dict[str, list[str]] = field(default_factory=dict)
    _calls: dict[int, dict[str, Any]] = field(default_factory=dict)

    def add(self, choice: _Choice) -> None:
        """Append a piece, as the OpenAI SDKs do."""
        said = False
        for name, value in (choice.delta or {}).items():
            said = said or (bool(value) and name != "role")
            if name in _TEXTS and isinstance(value, str):
                self._texts.setdefault(name, []).append(value)
            elif name == "tool_calls" and isinstance(value, list):
                self._add_calls(value)
        self._without_ids = self._without_ids or (said and choice.token_ids is None)
        self.mark(choice.unreadable)
        _add(choice, self.sampled)

    def mark(self, unreadable: tuple[str, ...]) -> None:
        """Name fields of the evidence that could not be read."""
        if unreadable:
            self._unreadable = tuple(dict.fromkeys((*self._unreadable, *unreadable)))

    def result(self, echo: _Echo) -> SampledChoice:
        """What was sampled, as far as it came. Text without ids makes the ids worthless."""
        self.returned = True
        sampled = self.sampled
        sampled.message = self._message()
        sampled.finish_reason = sampled.finish_reason or ABORTED
        sampled.unreadable = _first(echo.unreadable, self._unreadable)
        if self._without_ids or "token_ids" in self._unreadable:
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


def _add(choice: _Choice, sampled: SampledChoice) -> None:
    """Append ids, log-probabilities and the end of a choice to what came before."""
    if choice.token_ids is not None:
        sampled.ids = sampled.ids or []
        sampled.ids += choice.token_ids
    if choice.logprobs is not None and choice.logprobs.content is not None:
        sampled.logprobs = sampled.logprobs or []
        sampled.logprobs += [entry.logprob for entry in choice.logprobs.content]
    sampled.finish_reason = choice.finish_reason or sampled.finish_reason
    if choice.stop_reason is not None:
        sampled.stop_reason = choice.stop_reason
    sampled.routed_experts = choice.routed_experts or sampled.routed_experts
    for span in choice.weight_versions or ():
        sampled.weight_versions += (WeightSpan(str(span.version), span.start, span.end),)


def _first(*names: tuple[str, ...]) -> str:
    return next((name for some in names for name in some), "")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


# --- parsing


def _parse(data: bytes) -> _Chunk:
    """What is read of a completion or a chunk. Raises EngineBroken."""
    try:
        return _decode_chunk(data)
    except REFUSALS:
        pass
    try:
        fields = _encodable(parse_leniently(data))
        if isinstance(fields, dict):
            return _read_chunk(fields)
    except RecursionError:
        pass
    raise no_completion()


def _read_chunk(fields: dict[str, Any]) -> _Chunk:
    """The same, field by field."""
    choices = fields.get("choices")
    return _Chunk(
        [_read_choice(choice) for choice in choices if isinstance(choice, dict)]
        if isinstance(choices, list)
        else None,
        _as(_Usage, fields.get("usage")),
        dump(fields.get("prompt_token_ids")),
        dump(fields.get("error")),
    )


def _read_choice(fields: dict[str, Any]) -> _OddChoice:
    message, delta, reason = fields.get("message"), fields.get("delta"), fields.get("finish_reason")
    evidence = {
        name: _as(kind, fields.get(name))
        for name, kind in (("index", _Index), ("token_ids", list[_Id]), ("logprobs", _Logprobs))
    }
    return _OddChoice(
        **evidence,
        message=message if isinstance(message, dict) else None,
        delta=delta if isinstance(delta, dict) else {"": delta},  # something was said unless it is empty
        finish_reason=reason if isinstance(reason, str) else NO_REASON if reason else None,
        stop_reason=_as(_StopReason, fields.get("stop_reason")),
        routed_experts=_as(str, fields.get("routed_experts")),
        weight_versions=_as(list[_Span], fields.get("weight_versions")),
        odd=tuple(name for name, got in evidence.items() if got is None and fields.get(name) is not None),
    )


def _as(kind: Any, value: object) -> Any:
    """A value as one of a kind; None if it is not."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.MsgspecError:
        return None


def _encodable(value: Any) -> Any:
    """A value whose strings can all be encoded."""
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    if isinstance(value, dict):
        return {encodable(name): _encodable(item) for name, item in value.items()}
    return value
