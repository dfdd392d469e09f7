"""What clients send back of an answer: tokens that name its turn, and other forms of its text.

A client echoes thinking signatures, ids of tool calls and of response items, and encrypted reasoning. The
proxy puts a signed turn id into them, so that of several turns with equal text the one is continued that this
client got:

    token = base64url(turn id | item | signature)        16 + 2 + 12 bytes
    signature = HMAC-SHA256(secret, tenant | 0 | turn id | item), its first bytes

The secret belongs to the store, so every process that shares it reads the tokens of the others. A token holds
no text, and names nothing to another tenant.

Some clients send an answer back in words of their own that hold nothing new. smolagents puts the stop string
that ended an answer at its end, and tool calls into the text, as Python prints them:

    I look.
    Calling tools:
    [{'id': 'call_1', 'type': 'function', 'function': {'name': 'get_weather', 'arguments': {'city': 'Rome'}}}]

Its `CodeAgent`, whose model calls no tools, writes one call, whose argument is the code of the text. A turn
is found by these forms too. They are made of what was sampled, and nothing of what a client sends is parsed:
any other text is an edit. Source: smolagents 1.26, `memory.py` and `agents.py`.
"""

import base64
import hmac
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from tokenproxy.base.request import ChatRequest
from tokenproxy.record.match import Matcher
from tokenproxy.record.store import StoreError

_SECRET, _SECRET_BYTES = "secret", 32
"""Space of the secret in a store."""
_TURN_BYTES, _ITEM_BYTES, _SIGNATURE_BYTES = 16, 2, 12
_TOKEN = re.compile(r"[A-Za-z0-9_-]{40}")
"""A token has 30 bytes, which are 40 characters."""
_UNIQUE = re.compile(r"(?:chatcmpl-tool-|call_|toolu_)[0-9A-Za-z]{16,}|.*[0-9a-f]{16}.*")
"""Matches ids that an engine draws at random; `functions.get_weather:0` and `9f3bAx02k` repeat."""
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_CALL_PREFIX, _QUOTED_PREFIX = "call_", b'"call_'
_TOKEN_IDS = re.compile(rb'"(call_[A-Za-z0-9_-]{40})"')
_MARK = "Calling tools:\n"
_CODE, _CODE_END = "<code>", "</code>"


class Signer:
    """Makes and reads the tokens of one store."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def sign(self, tenant: str, turn: str, item: int = 0) -> str:
        """The token of a turn: 40 characters of the base64url alphabet.

        Raises:
            ValueError: `turn` is not the id of a turn, which has 32 hexadecimal digits.
        """
        named = bytes.fromhex(turn) + item.to_bytes(_ITEM_BYTES, "big")
        if len(named) != _TURN_BYTES + _ITEM_BYTES:
            raise ValueError(f"{turn} is not the id of a turn")
        return base64.urlsafe_b64encode(named + self._signature(tenant, named)).decode()

    def read(self, tenant: str, token: str) -> tuple[str, int] | None:
        """The turn that a token names, and the index among what that turn gave the client, such as its tool
        calls; None if the token is not one that was made for this tenant."""
        if not _TOKEN.fullmatch(token):
            return None
        data = base64.urlsafe_b64decode(token)
        named, signature = data[:-_SIGNATURE_BYTES], data[-_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._signature(tenant, named)):
            return None
        return named[:_TURN_BYTES].hex(), int.from_bytes(named[_TURN_BYTES:], "big")

    def signature(self, content: bytes) -> bytes:
        """The signature of the content of a session's key: 32 bytes, no part of a token's."""
        return hmac.digest(self._secret, b"session key\0" + content, "sha256")

    def _signature(self, tenant: str, named: bytes) -> bytes:
        return hmac.digest(self._secret, tenant.encode() + b"\0" + named, "sha256")[:_SIGNATURE_BYTES]


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """Makes the tokens of one turn, for the response to its client."""

    signer: Signer
    tenant: str
    turn: str

    def token(self, item: int = 0) -> str:
        """The token of the turn, or of one item of it."""
        return self.signer.sign(self.tenant, self.turn, item)

    def call_id(self, own: str, item: int) -> str:
        """The id under which a client gets a tool call: the engine's own if it is unique, else a token.

        Args:
            own: the engine's id.
            item: index of the call in the message.
        """
        return own if is_unique(own) else _CALL_PREFIX + self.token(item)


def turn_in(token: str) -> str | None:
    """The turn in a token that was not verified; None if the text has another form."""
    if not _TOKEN.fullmatch(token):
        return None
    return base64.urlsafe_b64decode(token)[:_TURN_BYTES].hex()


def is_unique(call_id: str) -> bool:
    """Whether an id of a tool call was drawn at random, so that no other call has it."""
    return _UNIQUE.fullmatch(call_id) is not None


class Echoes:
    """Finds out which turns the tokens of a request name. One per application."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self._signer: Signer | None = None

    async def signer(self) -> Signer | None:
        """Makes and reads tokens; None while the store does not respond."""
        if self._signer is None:
            try:
                # the same for all processes that share the store
                await self._matcher.store.put(_SECRET, "", os.urandom(_SECRET_BYTES), before=None)
                self._signer = Signer((await self._matcher.store.get(_SECRET, [""]))[""])
            except StoreError as error:
                error.report(self._matcher.metrics, "responses carry no tokens of their turns")
        return self._signer

    async def resolve(self, request: ChatRequest) -> ChatRequest:
        """The request with the turns that its tokens name, and with the engine's own ids of tool calls."""
        if not request.tokens and _QUOTED_PREFIX not in request.messages:
            return request
        signer = await self.signer()
        if signer is None:
            return request
        echoed = {
            index: read[0]
            for index, tokens in request.tokens.items()
            for token in tokens
            if (read := signer.read(request.tenant, token)) is not None
        }
        calls = await self._calls(request, signer)
        if not calls:
            return replace(request, echoed=echoed)
        try:
            messages, named = _with_ids(request.messages, calls)
        except _UNREADABLE:
            return replace(request, echoed=echoed)  # the engine refuses them with its own message
        fields = {**request.fields, "messages": msgspec.Raw(messages)}
        return replace(request, fields=fields, messages=messages, echoed=named | echoed)

    async def _calls(self, request: ChatRequest, signer: Signer) -> dict[str, tuple[str, str]]:
        """The engine's id and the turn of each tool call that the client knows under a token, by that."""
        found: dict[str, tuple[str, str]] = {}
        for name in set(_TOKEN_IDS.findall(request.messages)):
            call_id = name.decode()
            read = signer.read(request.tenant, call_id.removeprefix(_CALL_PREFIX))
            try:
                turn = await self._matcher.load(read[0]) if read is not None else None
            except StoreError as error:
                error.report(self._matcher.metrics, "a request's ids of tool calls stay those of the client")
                break
            if read is not None and turn is not None and read[1] < len(turn.call_ids):
                found[call_id] = (turn.call_ids[read[1]] or call_id, turn.id)
        return found


def _with_ids(messages: bytes, ids: Mapping[str, tuple[str, str]]) -> tuple[bytes, dict[int, str]]:
    """The messages with the engine's ids of tool calls, and the turns of the calls by index of message.

    Args:
        ids: the engine's id and the turn of each call, by the name that the client has for it.

    Raises one of `_UNREADABLE` if they are not a list of objects.
    """
    parsed: list[dict[str, Any]] = msgspec.json.decode(messages, type=list[dict[str, Any]])
    named: dict[int, str] = {}
    for index, message in enumerate(parsed):
        if (answered := str(message.get("tool_call_id"))) in ids:
            message["tool_call_id"] = ids[answered][0]
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, dict) and (name := str(call.get("id"))) in ids:
                call["id"], named[index] = ids[name]
    return msgspec.json.encode(parsed), named


def other_forms(
    message: dict[str, Any], stop_reason: str | int | None, turns_before: int
) -> Iterator[dict[str, Any]]:
    """The other forms of an answer.

    Args:
        stop_reason: the stop string that ended it was sampled, and is not in its text.
        turns_before: number of the assistant messages before it, by which `CodeAgent` names its calls in its
            first task; in later ones it counts these too, and such a turn is not found.
    """
    content = message.get("content") or ""
    if not isinstance(content, str):
        return
    if isinstance(stop_reason, str) and not content.endswith(stop_reason):
        content += stop_reason
        yield {**message, "content": content}
    printed = []
    if calls := message.get("tool_calls"):
        with suppress(LookupError, TypeError, ValueError, RecursionError):  # no client prints another shape
            for call in calls:
                called = call["function"]
                printed.append(_printed(call["id"], called["name"], json.loads(called["arguments"])))
    elif code := [each.strip() for each in _code_parts(content)]:
        printed = [_printed(f"call_{turns_before + 1}", "python_interpreter", "\n\n".join(code))]
    if printed and len(printed) == len(calls or printed):
        yield {"role": "assistant", "content": f"{content.strip()}\n{_MARK}{printed}"}


def _code_parts(content: str) -> Iterator[str]:
    """The texts after each `<code>` that ends, in time linear in the content."""
    start = content.find(_CODE)
    while start >= 0 and (end := content.find(_CODE_END, start)) >= 0:
        yield content[start + len(_CODE) : end]
        start = content.find(_CODE, end)


def _printed(own_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": own_id, "type": "function", "function": {"name": name, "arguments": arguments}}
