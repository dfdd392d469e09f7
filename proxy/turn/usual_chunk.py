r"""Cuts evidence out of the chunk that vLLM sends for nearly every sampled id, without parsing it.

vLLM writes such a chunk without white space, and its fields in a fixed order:

    {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,
     "delta":{"content":"Hi"},"logprobs":{"content":[{"token":"Hi","logprob":-0.1,"bytes":[72,105],
     "top_logprobs":[]}]},"finish_reason":null,"token_ids":[74]}],"usage":{"prompt_tokens":9, ...}}

A pattern describes the whole chunk from its first byte to its last, so that nothing in a string can be taken
for a field. It matches only valid JSON. Every other chunk is parsed by `StreamRedactor`.
"""

import re

from proxy.fields import NULL
from proxy.turn.visible import Visible

# Possessive quantifiers (`*+`): a chunk that does not match is refused without backtracking.
_TEXT = rb'"[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u00[0-9a-f]{2})[^"\\\x00-\x1f]*+)*+"'
_NATURAL = rb"(?:0|[1-9][0-9]*+)"
_NUMBER = rb"-?" + _NATURAL + rb"(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+"


def _list(item: bytes) -> bytes:
    """A pattern for items with commas between them."""
    return rb"%b(?:,%b)*+" % (item, item)


_NATURALS = rb"\[(?:%b)?+\]" % _list(_NATURAL)
_TOKEN = rb'"token":%b,"logprob":%b,"bytes":(?:null|%b)' % (_TEXT, _NUMBER, _NATURALS)
_LOGPROB = rb'\{%b,"top_logprobs":\[(?:%b)?+\]\}' % (_TOKEN, _list(rb"\{%b\}" % _TOKEN))
_COUNT = rb'"\w++":(?:null|%b)' % _NATURAL
_COUNTS = rb'"\w++":(?:null|%b|\{%b\})' % (_NATURAL, _list(_COUNT))
_ARGUMENTS = rb'"tool_calls":\[\{"index":%b,"function":\{"arguments":%b\}\}\]' % (_NATURAL, _TEXT)

_match = re.compile(
    rb'(\{"id":%b,"object":"chat\.completion\.chunk","created":%b,"model":%b,"choices":\[\{"index":%b,"delta":'
    % (_TEXT, _NATURAL, _TEXT, _NATURAL)
    + rb'\{(?:"content":%b|("reasoning(?:_content)?+":%b|%b))\},"logprobs":)' % (_TEXT, _TEXT, _ARGUMENTS)
    + rb'(null|\{"content":\[(?:%b)?+\]\})' % _list(_LOGPROB)
    + rb'(,"finish_reason":null(?:,"stop_reason":null)?+,"token_ids":)(%b)(\}\])' % _NATURALS
    + rb'(,"usage":\{%b\})\}' % _list(_COUNTS)
).fullmatch


def cut_evidence(data: bytes, visible: Visible) -> bytes | None:
    """The chunk with the fields that the client requested; None if it has another shape."""
    found = _match(data)
    if found is None:
        return None
    head, not_content, logprobs, middle, ids, end, usage = found.groups()
    if not_content and not visible.reasoning:
        return None
    return b"".join(
        (
            head,
            logprobs if visible.logprobs else NULL,
            middle,
            ids if visible.ids else NULL,
            end,
            usage if visible.running_usage else b"",
            b"}",
        )
    )
