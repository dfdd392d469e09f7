"""Chat completions as they come from an engine: take out what was sampled, leave out what nobody wants.

The engine is always asked for ids and log-probabilities. A client that asked for them too gets the engine's
own bytes; others get an answer in which these fields are null, as if they had not been asked for.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from proxy.errors import BadRequest, EngineBroken
from proxy.fields import NULL, given, join, parse, read
from proxy.history.evidence import Outcome, Sampled
from proxy.history.turn import ABORTED, WeightSpan
from proxy.types import Fields

_NULL = msgspec.Raw(NULL)
DONE = b"[DONE]"
_REASONING = ("reasoning", "reasoning_content")
_ECHO = b'"prompt_token_ids":['


class _Logprob(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Logprob] | None = None


class _Span(msgspec.Struct, gc=False):
    version: str | int
    start: int
    end: int


class _Usage(msgspec.Struct, gc=False):
    completion_tokens: int | None = None


class _Choice(msgspec.Struct):
    """What is read of a choice, whole or a piece of one; the rest only goes on."""

    index: int = 0
    message: dict[str, Any] | None = None
    delta: dict[str, Any] | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    routed_experts: str | None = None
    weight_versions: list[_Span] | None = None


class _Completion(msgspec.Struct):
    """What is read of a completion or a chunk."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    prompt_token_ids: msgspec.Raw = _NULL
    system_fingerprint: msgspec.Raw = _NULL
    error: msgspec.Raw = _NULL


_read_completion = msgspec.json.Decoder(_Completion).decode
_read_choices = msgspec.json.Decoder(list[Fields]).decode


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the client asked for."""

    ids: bool
    logprobs: bool
    usage: bool = False
    """Of a stream: how many tokens it had, at its end."""
    running_usage: bool = False
    """Of a stream: how many tokens it had so far, in each chunk."""
    reasoning: bool = True
    """If not, ids and log-probabilities are not wanted either: they would tell it."""

    @property
    def all(self) -> bool:
        """Whether the engine's whole answer can go on as it is."""
        return self.ids and self.logprobs and self.reasoning

    @property
    def every_chunk(self) -> bool:
        """Whether the engine's chunks can go on as they are."""
        return self.all and self.usage and self.running_usage


def take_whole(body: bytes, wanted: Wanted) -> tuple[Outcome, bytes]:
    """What was sampled in a whole completion, and the body for the client.

    Raises:
        BadRequest: the body is no chat completion; its caller knows that the engine is to blame.
    """
    prompt_ids, rest = _around_prompt(body)
    completion = _read(rest)
    if prompt_ids is None:
        prompt_ids = _unless_null(completion.prompt_token_ids)
    outcome = Outcome(prompt_ids, completion_tokens=_counted(completion))
    for choice in completion.choices or []:
        sampled = Sampled(choice.index, choice.message or {})
        _take(choice, sampled)
        outcome.choices.append(sampled)
    return outcome, body if wanted.all else _without(rest, prompt_ids, wanted)


def _without(rest: bytes, prompt_ids: bytes | None, wanted: Wanted) -> bytes:
    """A completion with what the client wants of it. `rest` may lack the prompt's ids."""
    fields = parse(rest)
    choices = _read_choices(fields.get("choices", b"[]"))
    for choice in choices:
        _leave_out(choice, wanted)
        if not wanted.reasoning:
            _hide_reasoning(choice, "message")
    if "prompt_token_ids" in fields:
        echo = prompt_ids if wanted.ids and prompt_ids is not None else NULL
        fields["prompt_token_ids"] = msgspec.Raw(echo)
    fields["choices"] = _list(choices)
    return join(fields)


def _around_prompt(body: bytes) -> tuple[bytes | None, bytes]:
    """The echoed prompt, most of the bytes, cut out unparsed, and the completion with null in its place.

    The echo's name with its quotes can stand in no JSON string; that it was a field of the completion itself
    is seen by the null that a parser finds there. Where anything is in doubt nothing is cut.
    """
    start = body.find(_ECHO) + len(_ECHO) - 1
    end = body.find(b"]", start) + 1
    if start < len(_ECHO) - 1 or not end:
        return None, body
    rest = body[:start] + NULL + body[end:]
    try:
        own = bytes(parse(rest).get("prompt_token_ids", b"")) == NULL
    except BadRequest:
        own = False
    return (body[start:end], rest) if own else (None, body)


@dataclass
class ChunkReader:
    """Takes what was sampled out of the chunks of a stream, one after the other.

    The stream must hold usage in each chunk: it tells whether all ids came.
    """

    wanted: Wanted
    expected: int = 1
    """How many choices there will be."""
    _prompt_ids: bytes | None = None
    _choices: dict[int, "_Streamed"] = field(default_factory=dict)
    _ended: int = 0
    _held: bytes | None = None
    _held_at: bytes = b""
    _fingerprint: bytes | None = None

    def take(self, data: bytes) -> bytes | None:
        """The event's data for the client; None if nothing is left of it that it asked for.

        Raises:
            EngineBroken: the data is no chunk.
        """
        try:
            chunk = _read(data)
            return self._take(chunk, data) if _unless_null(chunk.error) is None else data
        except (BadRequest, AttributeError, TypeError, ValueError) as error:
            raise EngineBroken(f"the engine streamed something that is no chunk: {error}") from error

    def held(self, data: bytes) -> bytes | None:
        """The chunk that ends the last choice, once the event behind it has come; None before and after.

        Asked for usage, vLLM says its fingerprint beside that, and otherwise at the end of the choice: for
        clients that want no usage it is moved there.
        """
        if self._held is None or data == self._held_at:
            return None
        held, self._held = self._held, None
        if self._fingerprint is None:
            return held
        return held[:-1] + b',"system_fingerprint":' + self._fingerprint + b"}"

    @property
    def complete(self) -> bool:
        """Whether every choice has ended."""
        return self._ended >= self.expected

    def ended(self) -> Outcome:
        """The choices that ended since this was asked last."""
        return self._outcome([choice for choice in self._choices.values() if choice.sampled.finish_reason])

    def rest(self) -> Outcome:
        """The choices that were not given out yet; what is without an end was broken off."""
        rest = [choice for choice in self._choices.values() if not choice.given_out]
        for choice in rest:
            choice.sampled.finish_reason = choice.sampled.finish_reason or ABORTED
        return self._outcome(rest)

    def _outcome(self, choices: list["_Streamed"]) -> Outcome:
        outcome = Outcome(self._prompt_ids)
        for choice in choices:
            if not choice.given_out:
                choice.given_out = True
                self._ended += 1
                outcome.choices.append(choice.result())
        return outcome

    def _take(self, chunk: _Completion, data: bytes) -> bytes | None:
        self._prompt_ids = _unless_null(chunk.prompt_token_ids) or self._prompt_ids
        choices = chunk.choices or []
        said = False
        for choice in choices:
            delta = choice.delta or {}
            streamed = self._choices.get(choice.index)
            if streamed is None:
                streamed = self._choices[choice.index] = _Streamed(Sampled(choice.index))
            streamed.add(delta, with_ids=choice.token_ids is not None)
            _take(choice, streamed.sampled)
            if len(choices) == 1 and (counted := _counted(chunk)) is not None:
                streamed.sampled.counted = counted
            shown = delta if self.wanted.reasoning else delta.keys() - set(_REASONING)
            said = said or bool(shown) or choice.finish_reason is not None
        if self.wanted.every_chunk:
            return data
        if not choices and not self.wanted.usage:
            self._fingerprint = _unless_null(chunk.system_fingerprint)
            return None
        if choices and not said and not self.wanted.ids and not self.wanted.logprobs:
            return None  # sent for its ids alone
        kept = self._left(data)
        last = all(streamed.sampled.finish_reason for streamed in self._choices.values())
        if self.wanted.usage or not last or len(self._choices) < self.expected:
            return kept
        self._held, self._held_at = kept, data
        return None

    def _left(self, data: bytes) -> bytes:
        """What is left of a chunk for the client."""
        fields = parse(data)
        choices = _read_choices(fields.get("choices", b"[]"))
        for choice in choices:
            _leave_out(choice, self.wanted)
            if not self.wanted.reasoning:
                _hide_reasoning(choice, "delta")
        if not self.wanted.ids and given(fields, "prompt_token_ids") is not None:
            fields["prompt_token_ids"] = _NULL
        if choices and not self.wanted.running_usage:
            fields.pop("usage", None)
        fields["choices"] = _list(choices)
        return join(fields)


@dataclass
class _Streamed:
    """A choice whose message comes in pieces."""

    sampled: Sampled
    given_out: bool = False
    _without_ids: bool = False
    _texts: dict[str, list[str]] = field(default_factory=dict)
    _calls: dict[int, dict[str, Any]] = field(default_factory=dict)

    def add(self, delta: dict[str, Any], *, with_ids: bool) -> None:
        """Put a delta behind what came before, as the OpenAI SDKs do."""
        said = any(value for name, value in delta.items() if name != "role")
        self._without_ids = self._without_ids or (said and not with_ids)
        for name in ("content", "reasoning", "reasoning_content", "refusal"):
            if isinstance(text := delta.get(name), str):
                self._texts.setdefault(name, []).append(text)
        for piece in delta.get("tool_calls") or []:
            call = self._calls.setdefault(piece.get("index", 0), {"type": "function", "function": {}})
            for name in ("id", "type"):
                if piece.get(name):
                    call[name] = piece[name]
            function = piece.get("function") or {}
            if function.get("name"):
                call["function"]["name"] = function["name"]
            if isinstance(arguments := function.get("arguments"), str):
                call["function"]["arguments"] = call["function"].get("arguments", "") + arguments

    def result(self) -> Sampled:
        """What was sampled, as far as it came. Text without ids makes the ids worth nothing."""
        self.sampled.message = self._message()
        if self._without_ids:
            self.sampled.ids = None
        return self.sampled

    def _message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None}
        message |= {name: "".join(texts) for name, texts in self._texts.items()}
        if self._calls:
            message["tool_calls"] = [call for _, call in sorted(self._calls.items())]
        return message


def _take(choice: _Choice, sampled: Sampled) -> None:
    """Ids, log-probabilities and the end of a choice, behind what it had before."""
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


def _read(body: bytes) -> _Completion:
    """What is read of a completion. Raises BadRequest."""
    try:
        return _read_completion(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"no chat completion: {error}") from error


def _unless_null(value: msgspec.Raw) -> bytes | None:
    content = bytes(value)
    return None if content == NULL else content


def _leave_out(choice: Fields, wanted: Wanted) -> None:
    if not wanted.ids and "token_ids" in choice:
        choice["token_ids"] = _NULL
    if not wanted.logprobs and "logprobs" in choice:
        choice["logprobs"] = _NULL


def _hide_reasoning(choice: Fields, name: str) -> None:
    """Take the reasoning out of a choice's message or delta."""
    message = read(choice, name, Fields) or {}
    for kept in _REASONING:
        if kept in message:
            message[kept] = _NULL
    if name == "delta":  # whose fields are those that are said
        message = {key: value for key, value in message.items() if bytes(value) != NULL}
    choice[name] = msgspec.Raw(join(message))


def _counted(completion: _Completion) -> int | None:
    return completion.usage.completion_tokens if completion.usage is not None else None


def _list(choices: list[Fields]) -> msgspec.Raw:
    return msgspec.Raw(b"[" + b",".join(join(choice) for choice in choices) + b"]")
