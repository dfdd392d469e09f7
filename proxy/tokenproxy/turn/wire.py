"""What vLLM answers, declared once: completions, their chunks, and errors.

The fields are those of three routes: in a chat completion a choice holds a `message` or `delta`, in a
completion and in a response of generate a `text`. A completion's choices hold their prompts and list
`token_logprobs`; the other two have `logprobs.content`. `parsing` reads a body into these structs.

The structs take no other field. What is only passed on or stored is `Raw`: it is checked once, and its bytes
are the engine's. So an answer is redacted by setting fields, and encoded again.
"""

from collections.abc import Callable, MutableSequence, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from tokenproxy.base.evidence import EVIDENCE, with_facts
from tokenproxy.base.fields import is_null
from tokenproxy.record.turn import Alternatives
from tokenproxy.turn.lenient import REFUSALS, fitting, parse_leniently, read_as, read_fields

NO_REASON = "unknown"
"""The finish reason of a choice whose own finish reason has an unknown shape."""
_MOST_ALTERNATIVES = 20
"""For one id: as many as OpenAI's API allows."""

_Id = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""Ids are stored as 32-bit integers."""
_Index = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]
"""The largest index of a choice: the id of a turn has four hexadecimal digits for it."""
_StopReason = str | Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Raw = Raw | UnsetType
_Text = str | UnsetType | None
_Natural = Annotated[int, msgspec.Meta(ge=0)]
_Byte = Annotated[int, msgspec.Meta(ge=0, le=255)]


class Logprob(msgspec.Struct, gc=False):
    """The log-probability of one sampled id; its other fields are skipped."""

    logprob: float


class _Only(Logprob, gc=False):
    """One without alternatives; one with some is refused."""

    top_logprobs: tuple[()] = ()


class Candidate(Logprob, gc=False):
    """One token that could be sampled, with its log-probability."""

    token: str = ""
    octets: list[_Byte] | None = msgspec.field(name="bytes", default=None)

    @property
    def spelled(self) -> bytes:
        """The bytes of the token."""
        return self.token.encode("utf-8", "replace") if self.octets is None else bytes(self.octets)


class Position(Candidate, gc=False):
    """The sampled token of one position, and the most probable ones."""

    top_logprobs: list[Candidate] = []


class Logprobs(msgspec.Struct, gc=False):
    """Log-probabilities in the two ways in which routes list them."""

    content: Sequence[Logprob] | None = None
    token_logprobs: MutableSequence[float] | None = None

    @property
    def values(self) -> MutableSequence[float] | None:
        """One log-probability for each sampled id; None if there are none."""
        return self.token_logprobs if self.content is None else [entry.logprob for entry in self.content]


class _OnlyLogprobs(Logprobs, gc=False):
    content: list[_Only] | None = None
    top_logprobs: None = None


class TokenLogprobs(Logprobs, gc=False):
    """Log-probabilities with their tokens."""

    content: list[Position] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None

    @property
    def alternatives(self) -> Alternatives:
        """The most probable tokens at each sampled id, which are shown to people and never trained on."""
        if self.content is None:
            tops = [list((top or {}).items()) for top in self.top_logprobs or ()]
            return [
                [(text.encode("utf-8", "replace"), logprob) for text, logprob in top[:_MOST_ALTERNATIVES]]
                for top in tops
            ]
        if not any(position.top_logprobs for position in self.content):
            return []
        return [
            [(token.spelled, token.logprob) for token in position.top_logprobs[:_MOST_ALTERNATIVES]]
            for position in self.content
        ]


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: _Natural | None = None


class _CompletionDetails(msgspec.Struct, gc=False):
    reasoning_tokens: _Natural | None = None


class Usage(msgspec.Struct, gc=False):
    """The usage that an engine reports."""

    prompt_tokens: _Natural = 0
    completion_tokens: _Natural | None = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Number of prompt ids in the engine's prefix cache; None if it does not tell."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None

    @property
    def reasoning_tokens(self) -> int | None:
        """Number of sampled ids of the reasoning; None if the engine does not tell."""
        return self.completion_tokens_details.reasoning_tokens if self.completion_tokens_details else None


class Delta(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """What a chunk adds to a message."""

    role: _Text = UNSET
    content: _Text = UNSET
    reasoning: _Text = UNSET
    reasoning_content: _Text = UNSET
    refusal: _Text = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType | None = UNSET

    @property
    def sampled(self) -> bool:
        """Whether it adds anything that was sampled."""
        return bool(
            self.content or self.reasoning or self.reasoning_content or self.tool_calls or self.refusal
        )


class Choice(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A choice, or one chunk's part of it."""

    index: _Index | UnsetType | None = UNSET
    message: _Raw = UNSET
    delta: Delta | UnsetType | None = UNSET
    text: _Text = UNSET
    logprobs: _Raw = UNSET
    finish_reason: _Text = UNSET
    stop_reason: _Raw = UNSET
    token_ids: _Raw = UNSET
    prompt_token_ids: _Raw = UNSET
    prompt_logprobs: _Raw = UNSET

    @property
    def said(self) -> dict[str, Any]:
        """The message, or what a chunk adds to it. A text becomes the content of one."""
        if delta := self.delta:
            values = ((name, getattr(delta, name)) for name in Delta.__struct_fields__)
            return {name: value for name, value in values if value is not UNSET}
        if self.message:
            return message_of(self.message)
        return {"content": self.text} if self.text else {}


if TYPE_CHECKING:
    TellingChoice = Choice
else:
    TellingChoice = with_facts(Choice, EVIDENCE, lambda _: _Raw, UNSET)
    """A choice with the facts of `EVIDENCE`, each by its name."""


class Completion(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A whole completion, or a chunk of a stream."""

    id: str | UnsetType = UNSET
    object: _Raw = UNSET
    created: int | UnsetType = UNSET
    model: str | UnsetType | None = UNSET
    choices: tuple[TellingChoice, ...] | UnsetType | None = UNSET
    service_tier: _Raw = UNSET
    usage: _Raw = UNSET
    system_fingerprint: _Raw = UNSET
    prompt_logprobs: _Raw = UNSET
    prompt_token_ids: _Raw = UNSET
    prompt_text: _Raw = UNSET
    kv_transfer_params: _Raw = UNSET
    ec_transfer_params: _Raw = UNSET
    metrics: _Raw = UNSET
    request_id: _Raw = UNSET
    output_mode: _Raw = UNSET
    mm_placeholders: _Raw = UNSET
    prompt_token_id_logprobs: _Raw = UNSET
    error: _Raw = UNSET
    """The engine's, in place of a completion or chunk; see `problem_of`."""


class CallPiece(msgspec.Struct, gc=False):
    """A tool call of a message, or the next piece of one."""

    position: int
    """Among the calls of the message, as the engine counts them: pieces of one call have one position."""
    id: str
    name: str
    arguments: str | None


_decode_ids: Callable[[Raw], list[int] | None] = msgspec.json.Decoder(list[_Id] | None).decode
_decode_logprobs: Callable[[Raw], Logprobs | None] = msgspec.json.Decoder(_OnlyLogprobs | None).decode
_decode_token_logprobs: Callable[[Raw], TokenLogprobs | None] = msgspec.json.Decoder(
    TokenLogprobs | None
).decode
_decode_usage: Callable[[bytes | Raw], Usage | None] = msgspec.json.Decoder(Usage | None).decode
_decode_stop_reason = msgspec.json.Decoder(_StopReason | None).decode
_decode_message = msgspec.json.Decoder(dict[str, Any] | None).decode


# --- the values of fields that are still JSON


def ids_of(data: _Raw) -> list[int] | None:
    """Ids; None if there are none. Raises msgspec.MsgspecError if they are something else."""
    return _decode_ids(data) if data else None


def logprobs_of(data: _Raw) -> Logprobs | None:
    """Log-probabilities, with their tokens if they have alternatives; None if there are none.

    Raises:
        msgspec.MsgspecError: they are something else.
    """
    if not data:
        return None
    try:
        return _decode_logprobs(data)
    except REFUSALS:
        for kind in (TokenLogprobs, Logprobs):  # with alternatives, or without those that cannot be read
            with suppress(msgspec.MsgspecError):
                read: Logprobs = read_as(bytes(data), kind)
                return read
        raise


def token_logprobs_of(data: _Raw) -> TokenLogprobs | None:
    """Log-probabilities with their tokens; None if there are none that can be read."""
    if not data:
        return None
    try:
        return _decode_token_logprobs(data)
    except REFUSALS:
        with suppress(msgspec.MsgspecError):
            read: TokenLogprobs | None = read_as(bytes(data), TokenLogprobs | None)
            return read
    return None


def usage_of(data: bytes | _Raw) -> Usage | None:
    """The usage; None if there is none. What cannot be read of it is left out."""
    if not data:
        return None
    try:
        return _decode_usage(data)
    except REFUSALS:
        fields = read_fields(bytes(data))
    return Usage(**fitting(Usage, fields)[0]) if fields else None


def message_of(data: _Raw) -> dict[str, Any]:
    """A message; an empty one if it is something else."""
    if not data:
        return {}
    try:
        return _decode_message(data) or {}
    except REFUSALS:
        message = parse_leniently(bytes(data))
    return message if isinstance(message, dict) else {}


def stop_reason_of(choice: Choice) -> str | int | None:
    """The stop string or token that ended a choice; None if it is neither, or there is none."""
    try:
        return _decode_stop_reason(choice.stop_reason) if choice.stop_reason else None
    except REFUSALS:
        return None


def is_set(data: _Raw) -> bool:
    """Whether a field is there and not null."""
    return isinstance(data, Raw) and not is_null(data)


# --- parts of a message


def thought_of(message: dict[str, Any]) -> str:
    """The reasoning in a message, or in a piece of one, under either of its names."""
    thought = message.get("reasoning") or message.get("reasoning_content")
    return thought if isinstance(thought, str) else ""


def text_of(message: dict[str, Any], name: str = "content") -> str:
    """A text in a message, or in a piece of one; empty if there is none."""
    text = message.get(name)
    return text if isinstance(text, str) else ""


def calls_of(message: dict[str, Any]) -> list[CallPiece]:
    """The tool calls in a message, or the pieces of calls in a piece of one. Those of whole messages have no
    index: it is their position."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return []
    pieces: list[CallPiece] = []
    for position, call in enumerate(calls):
        if isinstance(call, dict):
            index, function = call.get("index"), call.get("function")
            function = function if isinstance(function, dict) else {}
            arguments = function.get("arguments")
            pieces.append(
                CallPiece(
                    index if type(index) is int else position,
                    text_of(call, "id"),
                    text_of(function, "name"),
                    arguments if isinstance(arguments, str) else None,
                )
            )
    return pieces
