"""What vLLM answers, declared once: completions, their chunks, and errors.

The fields are those of three routes: in a chat completion a choice holds a `message` or `delta`, in a
completion and in a response of generate a `text`. A completion's choices hold their prompts and list
`token_logprobs`; the other two have `logprobs.content`. `parsing` reads a body into these structs.
"""

import re
from collections.abc import MutableSequence, Sequence
from typing import Annotated, Any

import msgspec

from tokenproxy.base.fields import NULL
from tokenproxy.base.request import Visible
from tokenproxy.record.turn import Alternatives

REFUSALS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The errors with which msgspec refuses a value."""
NO_REASON = "unknown"
"""The finish reason of a choice whose own finish reason has an unknown shape."""
ABSENT = msgspec.Raw(NULL)
"""The value of a field that a chunk does not have."""
ALTERNATIVES = b'"top_logprobs":[{'
"""In JSON without white space, what holds alternatives holds this; in a string the quotes are escaped."""
_MOST_ALTERNATIVES = 20
"""For one id: as many as OpenAI's API allows."""

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
    token_logprobs: MutableSequence[float] | None = None

    @property
    def values(self) -> MutableSequence[float] | None:
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
    token_ids: MutableSequence[_Id] | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: _StopReason | None = None
    routed_experts: str | None = None
    weight_versions: list[_Span] | None = None
    sampling_mask: list[list[_Id]] | None = None
    prompt_token_ids: msgspec.Raw = ABSENT

    @property
    def said(self) -> dict[str, Any]:
        """The message, or what a chunk adds to it. A text becomes the content of one."""
        said = self.message if self.delta is None else self.delta
        if said is not None:
            return said
        return {} if self.text is None else {"content": self.text}


class TokenChoice(Choice):
    """A choice whose log-probabilities are read with their tokens."""

    logprobs: TokenLogprobs | None = None


class OddChoice(Choice, kw_only=True):
    """A choice that was read field by field. It is never decoded from JSON, where `odd` is not a field."""

    odd: tuple[str, ...]
    """Names of the fields of the evidence that could not be read."""


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


class TokenCompletion(Completion):
    """A completion or a chunk, read with the tokens of its log-probabilities."""

    choices: tuple[TokenChoice, ...] | None = None


class CallPiece(msgspec.Struct, gc=False):
    """A tool call of a message, or the next piece of one."""

    position: int
    """Among the calls of the message, as the engine counts them: pieces of one call have one position."""
    id: str
    name: str
    arguments: str | None


_decode_usage = msgspec.json.Decoder(Usage).decode


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


# --- the usual chunk
#
# vLLM writes the chunk of nearly every sampled id without white space, and its fields in a fixed order:
#
#     {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,
#      "delta":{"content":"Hi"},"logprobs":{"content":[{"token":"Hi","logprob":-0.1,"bytes":[72,105],
#      "top_logprobs":[]}]},"finish_reason":null,"token_ids":[74]}],"usage":{"prompt_tokens":9, ...}}
#
# A pattern describes the whole chunk from its first byte to its last, so that nothing in a string can be
# taken for a field. It matches only valid JSON. Every other chunk is parsed.

# Possessive quantifiers (`*+`): a chunk that does not match is refused without backtracking.
_TEXT = rb'"[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u00[0-9a-f]{2})[^"\\\x00-\x1f]*+)*+"'
_NATURAL = rb"(?:0|[1-9][0-9]*+)"
_NUMBER = rb"-?" + _NATURAL + rb"(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+"


def _list(item: bytes) -> bytes:
    """A pattern for items with commas between them."""
    return rb"%b(?:,%b)*+" % (item, item)


def _token(number: bytes) -> bytes:
    return rb'"token":%b,"logprob":%b,"bytes":(?:null|%b)' % (_TEXT, number, _NATURALS)


def _logprob(number: bytes) -> bytes:
    return rb'\{%b,"top_logprobs":\[(?:%b)?+\]\}' % (_token(number), _list(rb"\{%b\}" % _token(_NUMBER)))


_NATURALS = rb"\[(?:%b)?+\]" % _list(_NATURAL)
_LOGPROBS = rb"%b((?:,%b)*+)" % (_logprob(rb"(%b)" % _NUMBER), _logprob(_NUMBER))
_COUNT = rb'"\w++":(?:null|%b)' % _NATURAL
_COUNTS = rb'"\w++":(?:null|%b|\{%b\})' % (_NATURAL, _list(_COUNT))
_ARGUMENTS = rb'"tool_calls":\[\{"index":%b,"function":\{"arguments":%b\}\}\]' % (_NATURAL, _TEXT)

_match_usual = re.compile(
    rb'(data: \{"id":%b,"object":"chat\.completion\.chunk","created":%b,' % (_TEXT, _NATURAL)
    + rb'"model":%b,"choices":\[\{"index":(%b),"delta":\{(?:"(content|reasoning(?:_content)?+)":(%b)|'
    % (_TEXT, _NATURAL, _TEXT)
    + rb'%b)\},"logprobs":)' % _ARGUMENTS
    + rb'(null|\{"content":\[(?:%b)?+\]\})' % _LOGPROBS
    + rb'(,"finish_reason":null(?:,"stop_reason":null)?+,"token_ids":)(%b)(\}\])' % _NATURALS
    + rb'(,"usage":(\{%b\}))' % _list(_COUNTS)
    + rb'((?:,"kv_transfer_params":null)?+)\}\n\n'  # which 0.33 adds
).fullmatch
_decode_text = msgspec.json.Decoder(str).decode
_MAX_IDS_BYTES = len("[123456789]")
"""An id of more digits may not fit into 32 bits."""
_MAX_INDEX_DIGITS = 4


class UsualChunk(msgspec.Struct, frozen=True, gc=False):
    """A chunk that matches the pattern: it is read and redacted without being parsed."""

    groups: tuple[bytes, ...]
    """Of the pattern."""
    choice: int = 0
    """The index of its choice."""
    field: str = ""
    """The field of the message which its text is part of; empty if the chunk must be parsed to be read,
    because it is not one id with a text and a log-probability, and nothing else."""
    text: str = ""
    token_id: int = 0
    logprob: float = 0.0
    usage: bytes = b""
    """The tokens so far, a JSON object."""

    @classmethod
    def match(cls, event: bytes) -> "UsualChunk | None":
        """The chunk of an event; None if it has another shape."""
        found = _match_usual(event)
        if found is None:
            return None
        groups = found.groups()
        _, index, field, text, logprobs, number, more, _, ids, _, _, usage, _ = groups
        if (
            field is None
            or number is None
            or more
            or len(ids) > _MAX_IDS_BYTES
            or len(index) > _MAX_INDEX_DIGITS
            or ALTERNATIVES in logprobs
        ):
            return cls(groups)
        try:
            name, decoded = field.decode(), _decode_text(text)
            return cls(groups, int(index), name, decoded, int(ids[1:-1]), float(number), usage)
        except (ValueError, msgspec.MsgspecError):  # no id, several ids, a text that is not UTF-8
            return cls(groups)

    def redacted(self, visible: Visible) -> bytes | None:
        """An event of the fields that the client requested; None if its reasoning is to be hidden."""
        head, _, field, _, logprobs, _, _, middle, ids, end, usage, _, transfer = self.groups
        if field != b"content" and not visible.reasoning:
            return None
        return b"".join(
            (
                head,
                logprobs if visible.logprobs else NULL,
                middle,
                ids if visible.ids else NULL,
                end,
                usage if visible.running_usage else b"",
                transfer,
                b"}\n\n",
            )
        )
