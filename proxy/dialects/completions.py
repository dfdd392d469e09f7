"""Chat completions as they come from an engine: take out what was sampled, leave out what nobody wants.

The engine is always asked for ids and log-probabilities. A client that asked for them too gets the engine's
own bytes; others get an answer in which these fields are null, as if they had not been asked for.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from proxy.errors import EngineBroken
from proxy.fields import NULL, given, join, parse, read
from proxy.rollout.evidence import Outcome, Sampled
from proxy.rollout.turn import ABORTED, WeightSpan
from proxy.types import Fields

_NULL = msgspec.Raw(NULL)
DONE = b"[DONE]"


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

    @property
    def all(self) -> bool:
        """Whether the engine's answer can go on as it is."""
        return self.ids and self.logprobs


def take_whole(body: bytes, wanted: Wanted) -> tuple[Outcome, bytes]:
    """What was sampled in a whole completion, and the body for the client.

    Raises:
        BadRequest: the body is no chat completion; its caller knows that the engine is to blame.
    """
    fields = parse(body)
    outcome = Outcome(prompt_ids=given(fields, "prompt_token_ids"), completion_tokens=_counted(fields))
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
    if not wanted.ids and "prompt_token_ids" in fields:
        fields["prompt_token_ids"] = _NULL
    fields["choices"] = _list(choices)
    return outcome, join(fields)


@dataclass
class ChunkReader:
    """Takes what was sampled out of the chunks of a stream, one after the other."""

    wanted: Wanted
    outcome: Outcome = field(default_factory=Outcome)
    broken: str = ""
    """The engine's words on why the stream ends early; empty if it does not."""
    _choices: dict[int, "_Streamed"] = field(default_factory=dict)

    def take(self, data: bytes) -> bytes | None:
        """The event's data for the client; None if nothing is left of it that it asked for.

        Raises:
            EngineBroken: the data is no chunk.
        """
        try:
            fields = parse(data)
            if "error" in fields:
                self.broken = bytes(fields["error"]).decode(errors="replace")[:500]
                return data
            return self._take(fields, data)
        except EngineBroken:
            raise
        except Exception as error:
            raise EngineBroken(f"the engine streamed something that is no chunk: {error}") from error

    @property
    def finished(self) -> bool:
        """Whether every choice that began has ended."""
        return bool(self._choices) and all(c.sampled.finish_reason for c in self._choices.values())

    def result(self, *, aborted: bool = False) -> Outcome:
        """What came so far; choices without an end are aborted ones where the stream was."""
        for _, choice in sorted(self._choices.items()):
            sampled = choice.sampled
            sampled.message = choice.message()
            if sampled.finish_reason is None and aborted:
                sampled.finish_reason = ABORTED
        self.outcome.choices = [choice.sampled for _, choice in sorted(self._choices.items())]
        return self.outcome

    def _take(self, fields: Fields, data: bytes) -> bytes | None:
        if (prompt := given(fields, "prompt_token_ids")) is not None:
            self.outcome.prompt_ids = prompt
        self.outcome.completion_tokens = _counted(fields) or self.outcome.completion_tokens
        choices = read(fields, "choices", list[Fields]) or []
        said = not choices  # a chunk about usage alone goes on
        for choice in choices:
            delta = read(choice, "delta", dict[str, Any]) or {}
            index = read(choice, "index", int) or 0
            streamed = self._choices.setdefault(index, _Streamed(Sampled(index)))
            streamed.add(delta)
            _take(choice, streamed.sampled)
            said = said or bool(delta) or given(choice, "finish_reason") is not None
        if self.wanted.all:
            return data
        if not said and not self.wanted.ids and not self.wanted.logprobs:
            return None  # sent for its ids alone
        for choice in choices:
            _leave_out(choice, self.wanted)
        if not self.wanted.ids and prompt is not None:
            fields["prompt_token_ids"] = _NULL
        fields["choices"] = _list(choices)
        return join(fields)


@dataclass
class _Streamed:
    """A choice whose message comes in pieces."""

    sampled: Sampled
    _texts: dict[str, list[str]] = field(default_factory=dict)
    _calls: dict[int, dict[str, Any]] = field(default_factory=dict)

    def add(self, delta: dict[str, Any]) -> None:
        """Put a delta behind what came before, as the OpenAI SDKs do."""
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

    def message(self) -> dict[str, Any]:
        """The message as far as it came."""
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


def _counted(fields: Fields) -> int | None:
    usage = read(fields, "usage", dict[str, Any]) or {}
    count = usage.get("completion_tokens")
    return count if isinstance(count, int) else None


def _list(choices: list[Fields]) -> msgspec.Raw:
    return msgspec.Raw(b"[" + b",".join(join(choice) for choice in choices) + b"]")
