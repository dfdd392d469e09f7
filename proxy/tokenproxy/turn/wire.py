"""What vLLM answers, declared once: completions, their chunks, and errors.

The fields are those of three routes: in a chat completion a choice holds a `message` or `delta`, in a
completion and in a response of generate a `text`. A completion's choices hold their prompts and list
`token_logprobs`; the other two have `logprobs.content`.

`parse` decodes a body once, for its record and for its client. One that does not fit the structs, or that
msgspec refuses, is read a second time, field by field: evidence of an unknown shape is named in
`Choice.unreadable`, and other fields of an unknown shape are left out.
"""

import json
from array import array
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from chat_tokenizer import InvalidIds, ids
from tokenproxy.base.errors import EngineBroken
from tokenproxy.base.fields import NULL
from tokenproxy.record.turn import Alternatives, ids_array
from tokenproxy.turn.cut import (
    CUT_FROM_BYTES,
    MARK,
    MARKED_IDS,
    MARKED_LOGPROBS,
    REFUSALS,
    Cut,
    cut_arrays,
    cut_prompt,
)

NO_REASON = "unknown"
"""The finish reason of a choice whose own finish reason has an unknown shape."""
ABSENT = msgspec.Raw(NULL)
"""The value of a field that a chunk does not have."""
ALTERNATIVES = b'"top_logprobs":[{'
"""In JSON without white space, what holds alternatives holds this; in a string the quotes are escaped."""
_MOST_ALTERNATIVES = 20
"""For one id: as many as OpenAI's API allows."""
_PROMPT_FROM_BYTES = 1024
"""Bytes of a body from which the echoed prompt is cut out, which takes a microsecond."""
_MOST_DIGITS = 4300
"""The most digits of an integer that Python parses."""

_Id = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""Ids are stored as 32-bit integers."""
_Index = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]
"""The largest index of a choice: the id of a turn has four hexadecimal digits for it."""
_StopReason = str | Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Natural = Annotated[int, msgspec.Meta(ge=0)]
_Byte = Annotated[int, msgspec.Meta(ge=0, le=255)]


class Logprob(msgspec.Struct, gc=False):
    """The log-probability of one sampled id; its other fields are skipped."""

    logprob: float


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
    token_logprobs: Sequence[float] | None = None

    @property
    def values(self) -> Sequence[float] | None:
        """One log-probability for each sampled id; None if there are none."""
        return self.token_logprobs if self.content is None else [entry.logprob for entry in self.content]


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


class _Span(msgspec.Struct, gc=False):
    version: str | int
    start: _Id
    end: _Id


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


class Choice(msgspec.Struct):
    """A choice, or one chunk's part of it."""

    index: _Index | None = None
    message: dict[str, Any] | None = None
    delta: dict[str, Any] | None = None
    text: str | None = None
    token_ids: Sequence[_Id] | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: _StopReason | None = None
    routed_experts: str | None = None
    weight_versions: list[_Span] | None = None
    sampling_mask: list[list[_Id]] | None = None
    prompt_token_ids: msgspec.Raw = ABSENT

    @property
    def whole_message(self) -> dict[str, Any]:
        """The message of a whole completion. A text, or ids without one, become an assistant's message."""
        if self.message is not None:
            return self.message
        nothing = self.text is None and self.token_ids is None
        return {} if nothing else {"role": "assistant", "content": self.text}

    @property
    def new_text(self) -> dict[str, Any]:
        """The part of the message that a chunk adds."""
        if self.delta is not None:
            return self.delta
        return {} if self.text is None else {"content": self.text}

    @property
    def unreadable(self) -> tuple[str, ...]:
        """Names of the fields of the evidence that could not be read."""
        return ()


class _TokenChoice(Choice):
    logprobs: TokenLogprobs | None = None


class _OddChoice(Choice, kw_only=True):
    """A choice that was read field by field. It is never decoded from JSON, where `odd` is not a field."""

    odd: tuple[str, ...]

    @property
    def unreadable(self) -> tuple[str, ...]:
        return self.odd


class Completion(msgspec.Struct):
    """A whole completion, or a chunk of a stream."""

    id: str = ""
    created: int = 0
    model: str = ""
    choices: tuple[Choice, ...] | None = None
    usage: Usage | None = None
    prompt_token_ids: msgspec.Raw = ABSENT
    error: msgspec.Raw = ABSENT
    """The engine's, in place of a completion or chunk; see `problem_of`."""


class _TokenCompletion(Completion):
    choices: tuple[_TokenChoice, ...] | None = None


class Parsed(msgspec.Struct, frozen=True, gc=False):
    """A completion or a chunk, and its JSON."""

    completion: Completion
    cut: Cut


class Problem(msgspec.Struct):
    """An error of the engine."""

    message: str = ""
    code: int | str | None = None

    @property
    def name(self) -> str | None:
        """The code, if it is a word and not a status."""
        return self.code if isinstance(self.code, str) else None


class _Refused(msgspec.Struct):
    error: Problem


class CallPiece(msgspec.Struct, gc=False):
    """A tool call of a message, or the next piece of one."""

    position: int
    """Among the calls of the message, as the engine counts them: pieces of one call have one position."""
    id: str
    name: str
    arguments: str | None


_decode = msgspec.json.Decoder(Completion).decode
_decode_with_tokens = msgspec.json.Decoder(_TokenCompletion).decode
_decode_logprobs = msgspec.json.Decoder(list[Logprob]).decode
_decode_problem = msgspec.json.Decoder(_Refused).decode
_decode_usage = msgspec.json.Decoder(Usage).decode
decode_ids = msgspec.json.Decoder(list[_Id]).decode
"""Parses a JSON array of ids. Raises one of `REFUSALS`."""


def parse(body: bytes, *, tokens: bool = False, whole: bool = False, one_prompt: bool = True) -> Parsed:
    """Parse a completion or a chunk.

    Args:
        one_prompt: False for the completions route, whose choices echo their prompts.
        tokens: whether to read the tokens of log-probabilities. Alternatives are always read.
        whole: whether it is a whole completion, whose long arrays are then converted without objects for ids.

    Raises:
        EngineBroken: it is not a JSON object, or is nested too deeply.
    """
    tokens = tokens or ALTERNATIVES in body
    size = len(body) if one_prompt else 0
    if whole and not tokens and size >= CUT_FROM_BYTES and (parsed := _parse_cut(cut_arrays(body))):
        return parsed
    if size >= _PROMPT_FROM_BYTES and (parsed := _parse_cut(cut_prompt(body), tokens=tokens)):
        return parsed
    try:
        return Parsed(_decode_with_tokens(body) if tokens else _decode(body), Cut(body))
    except REFUSALS:
        pass
    try:
        fields = _encodable(parse_leniently(body))
        if isinstance(fields, dict):
            return Parsed(_read(fields), Cut(body))
    except RecursionError:
        pass
    raise no_completion()


def _parse_cut(cut: Cut | None, *, tokens: bool = False) -> Parsed | None:
    """A completion whose arrays were cut out; None if they do not belong where they were."""
    if cut is None:
        return None
    try:
        completion = _decode_with_tokens(cut.rest) if tokens else _decode(cut.rest)
        return Parsed(completion, cut) if _put_back(cut, completion) else None
    except (*REFUSALS, ValueError, InvalidIds):
        return None


def _put_back(cut: Cut, completion: Completion) -> bool:
    """Put converted arrays in place of their marks. Returns False if a mark has another place.

    Raises:
        ValueError: there are several choices.
        InvalidIds: no turn can hold these ids.
        msgspec.MsgspecError: the log-probabilities are none.
    """
    if cut.prompt is not None:
        if completion.prompt_token_ids != msgspec.Raw(MARK):
            return False
        completion.prompt_token_ids = msgspec.Raw(cut.prompt)
    if cut.ids is None:
        return True
    (choice,) = completion.choices or ()
    logprobs = choice.logprobs.values if choice.logprobs else None
    if choice.token_ids != MARKED_IDS or (cut.logprobs is not None and logprobs != MARKED_LOGPROBS):
        return False
    choice.token_ids = ids_array(ids.pack_compact(cut.ids))
    if cut.logprobs is not None:
        entries = _decode_logprobs(cut.logprobs)
        choice.logprobs = Logprobs(token_logprobs=array("f", [entry.logprob for entry in entries]))
    return True


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


def completion_tokens(usage: bytes) -> int | None:
    """The number of sampled ids in a JSON object of usage; None if it holds none."""
    try:
        return _decode_usage(usage).completion_tokens
    except REFUSALS:
        return None


def problem_of(body: bytes) -> Problem:
    """The error in an engine's response, or in the data of an event; another text is its message."""
    try:
        return _decode_problem(body).error
    except REFUSALS:
        return Problem(body.decode(errors="replace") or "the engine returned an error without a message")


# --- what msgspec refuses


def parse_leniently(data: bytes) -> Any:
    """Parse JSON as Python does: NaN and Infinity are numbers, and bytes that are not UTF-8 are replaced.

    Raises:
        EngineBroken: it is not JSON, or is nested too deeply.
    """
    try:
        return _lenient.decode(data.decode("utf-8-sig", "replace"))
    except (ValueError, RecursionError) as error:
        raise no_completion() from error


def dump(value: object) -> msgspec.Raw:
    """Encode a value of `parse_leniently` as JSON."""
    return msgspec.Raw(json.dumps(value, separators=(",", ":")).encode())


def encodable(text: str) -> str:
    """Remove lone surrogates, which UTF-8 cannot encode, from a string of `parse_leniently`."""
    return text.encode("utf-8", "replace").decode()


def no_completion() -> EngineBroken:
    """The error for a body, or the data of an event, that is not a JSON object."""
    return EngineBroken("the engine's response is not a chat completion")


def _integer(digits: str) -> float:
    return int(digits) if len(digits) < _MOST_DIGITS else float(digits)


_lenient = json.JSONDecoder(parse_int=_integer)


def _read(fields: dict[str, Any]) -> Completion:
    """A completion or a chunk, field by field."""
    choices = fields.pop("choices", None)
    known, _ = _fitting(Completion, fields)
    if "usage" not in known and isinstance(usage := fields.get("usage"), dict):
        known["usage"] = Usage(**_fitting(Usage, usage)[0])
    if isinstance(choices, list):
        known["choices"] = tuple(_read_choice(choice) for choice in choices if isinstance(choice, dict))
    return Completion(**known)


def _read_choice(fields: dict[str, Any]) -> Choice:
    known, odd = _fitting(_TokenChoice, fields)
    if "logprobs" in odd and (logprobs := _as(Logprobs, fields["logprobs"])) is not None:
        known["logprobs"] = logprobs  # without its alternatives
        odd.remove("logprobs")
    if "message" in odd:
        known["message"] = {}
    if "delta" in odd and "text" not in known:
        known["delta"] = {"": fields["delta"]}  # an empty one: nothing was sampled
    if "finish_reason" in odd and fields["finish_reason"]:
        known["finish_reason"] = NO_REASON
    evidence = tuple(name for name in ("index", "token_ids", "logprobs") if name in odd)
    return _OddChoice(**known, odd=evidence)


def _fitting(kind: type[msgspec.Struct], fields: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields that have the types which a struct declares, and the names of the others."""
    known: dict[str, Any] = {}
    odd: list[str] = []
    for field in msgspec.structs.fields(kind):
        value = fields.get(field.name)
        if value is None:
            continue
        known[field.name] = dump(value) if field.type is msgspec.Raw else _as(field.type, value)
        if known[field.name] is None:
            del known[field.name]
            odd.append(field.name)
    return known, odd


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
