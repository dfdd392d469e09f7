"""Chat completions as they come from an engine: take out what was sampled, leave out what nobody wants.

The engine is always asked for ids and log-probabilities. A client that asked for them too gets the engine's
own bytes; others get an answer in which these fields are null, as if they had not been asked for.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from proxy.errors import BadRequest, EngineBroken
from proxy.fields import NULL, given, join, parse, read
from proxy.rollout.evidence import Outcome, Sampled
from proxy.rollout.turn import ABORTED, WeightSpan
from proxy.types import Fields

_NULL = msgspec.Raw(NULL)
DONE = b"[DONE]"
_ECHO = b'"prompt_token_ids":['
_ID_BYTES = b"[]0123456789, \t\r\n"


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Span(msgspec.Struct):
    version: str | int
    start: int
    end: int


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
    prompt_ids, fields = _parse_around_prompt(body)
    outcome = Outcome(prompt_ids, completion_tokens=_counted(fields))
    choices = read(fields, "choices", list[Fields]) or []
    for choice in choices:
        sampled = Sampled(read(choice, "index", int) or 0)
        sampled.message = read(choice, "message", dict[str, Any]) or {}
        _take(choice, sampled)
        outcome.choices.append(sampled)
    if wanted.all:
        return outcome, body
    for choice in choices:
        _leave_out(choice, wanted)
        if not wanted.reasoning:
            _hide_reasoning(choice, "message")
    if "prompt_token_ids" in fields:
        echo = prompt_ids if wanted.ids and prompt_ids is not None else NULL
        fields["prompt_token_ids"] = msgspec.Raw(echo)
    fields["choices"] = _list(choices)
    return outcome, join(fields)


def _parse_around_prompt(body: bytes) -> tuple[bytes | None, Fields]:
    """The echoed prompt and the fields of a completion. The echo, most of the bytes, is cut out unparsed.

    Its name with its quotes can stand in no JSON string, and that it was a field of the completion itself is
    seen by the null that stands there afterwards.
    """
    start = body.find(_ECHO) + len(_ECHO) - 1
    end = body.find(b"]", start) + 1
    if start >= len(_ECHO) - 1 and end:
        fields = parse(body[:start] + NULL + body[end:])
        prompt = body[start:end]
        if bytes(fields.get("prompt_token_ids", b"")) == NULL and not prompt.translate(None, _ID_BYTES):
            return prompt, fields
    fields = parse(body)
    return given(fields, "prompt_token_ids"), fields


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
            fields = parse(data)
            return data if "error" in fields else self._take(fields, data)
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

    def _take(self, fields: Fields, data: bytes) -> bytes | None:
        prompt = given(fields, "prompt_token_ids")
        self._prompt_ids = prompt if prompt is not None else self._prompt_ids
        choices = read(fields, "choices", list[Fields]) or []
        said = False
        for choice in choices:
            delta = read(choice, "delta", dict[str, Any]) or {}
            index = read(choice, "index", int) or 0
            streamed = self._choices.setdefault(index, _Streamed(Sampled(index)))
            streamed.add(delta, with_ids=given(choice, "token_ids") is not None)
            _take(choice, streamed.sampled)
            if len(choices) == 1 and (counted := _counted(fields)) is not None:
                streamed.sampled.counted = counted
            if not self.wanted.reasoning:
                delta = _hide_reasoning(choice, "delta")
            said = said or bool(delta) or given(choice, "finish_reason") is not None
        if self.wanted.every_chunk:
            return data
        kept = self._left(fields, choices, said)
        last = all(c.sampled.finish_reason for c in self._choices.values())
        if kept is None or self.wanted.usage or not last or len(self._choices) < self.expected:
            return kept
        self._held, self._held_at = kept, data
        return None

    def _left(self, fields: Fields, choices: list[Fields], said: bool) -> bytes | None:
        """What is left of a chunk for the client."""
        if not choices and not self.wanted.usage:
            self._fingerprint = given(fields, "system_fingerprint")
            return None
        if choices and not said and not self.wanted.ids and not self.wanted.logprobs:
            return None  # sent for its ids alone
        for choice in choices:
            _leave_out(choice, self.wanted)
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


def _take(choice: Fields, sampled: Sampled) -> None:
    """Ids, log-probabilities and the end of a choice, behind what it had before."""
    tokens = read(choice, "token_ids", list[int])
    if tokens is not None:
        sampled.ids = sampled.ids or []
        sampled.ids += tokens
    logprobs = read(choice, "logprobs", _Logprobs)
    if logprobs is not None and logprobs.content is not None:
        sampled.logprobs = sampled.logprobs or []
        sampled.logprobs += [entry.logprob for entry in logprobs.content]
    if (reason := read(choice, "finish_reason", str)) is not None:
        sampled.finish_reason = reason
    if (stop := read(choice, "stop_reason", str | int)) is not None:  # type: ignore[arg-type]
        sampled.stop_reason = stop
    if (experts := read(choice, "routed_experts", str)) is not None:
        sampled.routed_experts = experts
    for span in read(choice, "weight_versions", list[_Span]) or []:
        sampled.weight_versions += (WeightSpan(str(span.version), span.start, span.end),)


def _leave_out(choice: Fields, wanted: Wanted) -> None:
    if not wanted.ids and "token_ids" in choice:
        choice["token_ids"] = _NULL
    if not wanted.logprobs and "logprobs" in choice:
        choice["logprobs"] = _NULL


def _hide_reasoning(choice: Fields, name: str) -> Fields:
    """The message or delta of a choice without its reasoning."""
    message = read(choice, name, Fields) or {}
    for kept in ("reasoning", "reasoning_content"):
        if kept in message:
            message[kept] = _NULL
    if name == "delta":  # whose fields are those that are said
        message = {key: value for key, value in message.items() if bytes(value) != NULL}
    choice[name] = msgspec.Raw(join(message))
    return message


def _counted(fields: Fields) -> int | None:
    usage = read(fields, "usage", dict[str, Any]) or {}
    count = usage.get("completion_tokens")
    return count if isinstance(count, int) else None


def _list(choices: list[Fields]) -> msgspec.Raw:
    return msgspec.Raw(b"[" + b",".join(join(choice) for choice in choices) + b"]")
