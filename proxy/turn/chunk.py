"""The completions of an engine, and their chunks, as typed structs.

The fields are those of three routes: in a chat completion a choice holds a `message` or `delta`, in a
completion and in a response of generate a `text`. A completion's choices hold their prompts and list
`token_logprobs`; the other two have `logprobs.content`.

A body is decoded into the structs. One that does not fit them, or that msgspec refuses, is read a second
time, field by field: evidence of an unknown shape is named in `Choice.unreadable`, and other fields of an
unknown shape are left out.
"""

from typing import Annotated, Any

import msgspec

from proxy.fields import NULL, is_null
from proxy.turn.engine_json import REFUSALS, dump, encodable, no_completion, parse_leniently

NO_REASON = "unknown"
"""The finish reason of a choice whose own finish reason has an unknown shape."""
ABSENT = msgspec.Raw(NULL)
"""The value of a field that a chunk does not have."""

_Id = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""Ids are stored as 32-bit integers."""
_Index = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]
"""The largest index of a choice: the id of a turn has four hexadecimal digits for it."""
_StopReason = str | Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class Logprob(msgspec.Struct, gc=False):
    """The log-probability of one sampled id; its other fields are skipped."""

    logprob: float


class _Logprobs(msgspec.Struct, gc=False):
    content: list[Logprob] | None = None
    token_logprobs: list[float] | None = None

    def values(self) -> list[float] | None:
        """One log-probability for each sampled id; None if there are none."""
        if self.content is not None:
            return [entry.logprob for entry in self.content]
        return self.token_logprobs


class _Span(msgspec.Struct, gc=False):
    version: str | int
    start: _Id
    end: _Id


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None


_decode_details = msgspec.json.Decoder(_PromptDetails).decode


class Usage(msgspec.Struct, gc=False):
    """The usage that an engine reports."""

    completion_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    prompt_tokens_details: msgspec.Raw = ABSENT

    @property
    def cached_tokens(self) -> int | None:
        """Number of prompt ids in the engine's prefix cache; None if it does not tell."""
        if is_null(self.prompt_tokens_details):
            return None
        try:
            return _decode_details(self.prompt_tokens_details).cached_tokens
        except REFUSALS:
            return None


class ChoiceFields(msgspec.Struct):
    """The small fields of a choice, or of one chunk's part of it."""

    index: _Index | None = None
    finish_reason: str | None = None
    stop_reason: _StopReason | None = None
    routed_experts: str | None = None
    weight_versions: list[_Span] | None = None
    sampling_mask: list[list[_Id]] | None = None


class Choice(ChoiceFields):
    """The parsed fields of a choice, or of one chunk's part of it."""

    message: dict[str, Any] | None = None
    delta: dict[str, Any] | None = None
    text: str | None = None
    token_ids: list[_Id] | None = None
    logprobs: _Logprobs | None = None
    prompt_token_ids: msgspec.Raw = ABSENT

    def whole_message(self) -> dict[str, Any]:
        """The message of a whole completion. A text, or ids without one, become an assistant's message."""
        if self.message is not None:
            return self.message
        nothing = self.text is None and self.token_ids is None
        return {} if nothing else {"role": "assistant", "content": self.text}

    def new_text(self) -> dict[str, Any]:
        """The part of the message that a chunk adds."""
        if self.delta is not None:
            return self.delta
        return {} if self.text is None else {"content": self.text}

    @property
    def unreadable(self) -> tuple[str, ...]:
        """Names of the fields of the evidence that could not be read."""
        return ()


class _OddChoice(Choice, kw_only=True):
    """A choice that was read field by field. It is never decoded from JSON, where `odd` is not a field."""

    odd: tuple[str, ...]

    @property
    def unreadable(self) -> tuple[str, ...]:
        return self.odd


class Chunk(msgspec.Struct):
    """The parsed fields of a whole completion, or of a chunk of a stream."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    prompt_token_ids: msgspec.Raw = ABSENT
    error: msgspec.Raw = ABSENT

    @property
    def counted(self) -> int | None:
        """The number of sampled ids as the engine counted them."""
        return None if self.usage is None else self.usage.completion_tokens


_decode_usage = msgspec.json.Decoder(Usage).decode
_decode_chunk = msgspec.json.Decoder(Chunk).decode
decode_ids = msgspec.json.Decoder(list[_Id]).decode
"""Parses a JSON array of ids. Raises one of `engine_json.REFUSALS`."""


def completion_tokens(usage: bytes) -> int | None:
    """The number of sampled ids in a JSON object of usage; None if it holds none."""
    try:
        return _decode_usage(usage).completion_tokens
    except REFUSALS:
        return None


def parse_chunk(data: bytes) -> Chunk:
    """Parse a completion or a chunk. Raises EngineBroken."""
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


def _read_chunk(fields: dict[str, Any]) -> Chunk:
    """Parse a completion or a chunk field by field."""
    choices = fields.get("choices")
    return Chunk(
        [_read_choice(choice) for choice in choices if isinstance(choice, dict)]
        if isinstance(choices, list)
        else None,
        _read_usage(fields.get("usage")),
        dump(fields.get("prompt_token_ids")),
        dump(fields.get("error")),
    )


def _read_usage(value: Any) -> Usage | None:
    """Parse usage field by field; None if it is of an unknown shape."""
    if not isinstance(value, dict):
        return None
    counted = _as(Usage, {name: value[name] for name in ("completion_tokens",) if name in value})
    if counted is not None:
        counted.prompt_tokens_details = dump(value.get("prompt_tokens_details"))
    usage: Usage | None = counted
    return usage


def _read_choice(fields: dict[str, Any]) -> _OddChoice:
    message, delta, reason = fields.get("message"), fields.get("delta"), fields.get("finish_reason")
    text = fields.get("text")
    evidence = {
        name: _as(kind, fields.get(name))
        for name, kind in (("index", _Index), ("token_ids", list[_Id]), ("logprobs", _Logprobs))
    }
    return _OddChoice(
        **evidence,
        message=message if isinstance(message, dict) else None if message is None else {},
        # an empty one: nothing was sampled
        delta=delta if isinstance(delta, dict) else None if isinstance(text, str) else {"": delta},
        text=text if isinstance(text, str) else None,
        finish_reason=reason if isinstance(reason, str) else NO_REASON if reason else None,
        stop_reason=_as(_StopReason, fields.get("stop_reason")),
        routed_experts=_as(str, fields.get("routed_experts")),
        weight_versions=_as(list[_Span], fields.get("weight_versions")),
        sampling_mask=_as(list[list[_Id]], fields.get("sampling_mask")),
        prompt_token_ids=dump(fields.get("prompt_token_ids")),
        odd=tuple(name for name, got in evidence.items() if got is None and fields.get(name) is not None),
    )


def _as(kind: Any, value: object) -> Any:
    """The value if it has the type `kind`; else None."""
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
