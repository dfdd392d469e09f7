"""The usual chunk of a stream, read and redacted without being parsed: that takes two thirds of the time.

vLLM writes the chunk of nearly every sampled id without white space, and its fields in a fixed order:

    {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,
     "delta":{"content":"Hi"},"logprobs":{"content":[{"token":"Hi","logprob":-0.1,"bytes":[72,105],
     "top_logprobs":[]}]},"finish_reason":null,"token_ids":[74]}],"usage":{"prompt_tokens":9, ...}}

A pattern describes the whole chunk from its first byte to its last, so that nothing in a string can be taken
for a field. It matches only valid JSON. Every other chunk is parsed, and to what is parsed this adds nothing:
without it, all chunks take that way.
"""

import re

import msgspec

from tokenproxy.base.fields import NULL
from tokenproxy.base.request import Visible

_ALTERNATIVES = b'"top_logprobs":[{'
"""What a chunk with alternatives holds; in a string the quotes are escaped."""

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
            or _ALTERNATIVES in logprobs
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
