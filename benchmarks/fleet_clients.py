"""Clients of the fleet benchmark: plain OpenAI clients that hold the conversations of a load."""

import asyncio
import random
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

import msgspec
import uvloop

from benchmarks.cases import CHAT, HEADERS, http_request
from benchmarks.fleet_engines import MODEL
from benchmarks.fleet_load import Conversation
from benchmarks.fleet_words import Words
from benchmarks.load import BadResponse

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_SOURCE = re.compile(rb"\r\nx-prompt-source: *(\w+)", re.IGNORECASE)
_TEMPLATE_IDS = 4
"""Ids that the chat template adds to a message, about."""
_TOOLS = msgspec.Raw(
    b'[{"type":"function","function":{"name":"run","parameters":{"type":"object","properties":{}}}}]'
)


@dataclass(frozen=True, slots=True)
class Clients:
    """How the clients of a run behave."""

    port: int
    connections: int
    """Conversations at the same time."""
    limit_s: float
    """When to give up."""
    all_sessions: bool = False
    """Whether every client names its session; else only those of the load that do."""
    finish: bool = False
    """Whether clients call vllm-router's `/finish_session` at the end."""
    faster: float = 1.0
    """Shorten the pauses."""
    patient: bool = False
    """Whether to go on with another conversation after an error."""


@dataclass(slots=True)
class Held:
    """What the clients saw."""

    makespan_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    """Of each turn, in the order of the responses."""
    begun: int = 0
    """Conversations with a response."""
    cut: bool = False
    """Whether the time was up before the last response."""
    extended: int = 0
    """Turns for whose prompt the proxy continued recorded ids."""
    prompt_ids: int = 0
    cached_ids: int = 0
    errors: list[str] = field(default_factory=list)
    """Why conversations ended early."""


class _Usage(msgspec.Struct):
    prompt_tokens: int
    prompt_tokens_details: dict[str, int] | None = None


class _ToolCall(msgspec.Struct):
    id: str


class _Message(msgspec.Struct):
    tool_calls: list[_ToolCall]


class _Choice(msgspec.Struct):
    message: msgspec.Raw


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage


def hold(load: Sequence[Conversation], words: Words, clients: Clients) -> Held:
    """Hold all conversations, `connections` at a time.

    Raises:
        BadResponse: a status is not 200, or a connection was closed.
    """
    return uvloop.run(hold_all(load, words, clients, Held()))


async def hold_all(load: Iterable[Conversation], words: Words, clients: Clients, held: Held) -> Held:
    """Hold conversations until there are no more, or the time is up; `held` shows how it goes.

    Raises:
        BadResponse: as `hold`, unless the clients are patient.
    """
    waiting = iter(load)
    start = time.perf_counter()

    async def client() -> None:
        for conversation in waiting:
            try:
                await Talk(conversation, words, clients, held).hold()
            except BadResponse as error:
                if not clients.patient:
                    raise
                held.errors.append(str(error))

    try:
        async with asyncio.timeout(clients.limit_s):
            await asyncio.gather(*(client() for _ in range(clients.connections)))
    except TimeoutError:
        held.cut = True
    held.makespan_s = time.perf_counter() - start
    return held


class Talk:
    """One conversation on one connection."""

    def __init__(self, conversation: Conversation, words: Words, clients: Clients, held: Held) -> None:
        self._conversation, self._words, self._clients, self._held = conversation, words, clients, held
        self._texts = random.Random(f"conversation {conversation.number}")
        self._session = f"session-{conversation.number}"
        self._headers = dict(HEADERS)
        if clients.all_sessions or conversation.session:
            self._headers["x-session-id"] = self._session
        self._messages = list(map(msgspec.json.encode, self._opening()))
        self._decoder = msgspec.json.Decoder(_Completion)

    async def hold(self) -> None:
        """Take all turns."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._clients.port, limit=2**20)
        try:
            for number, turn in enumerate(self._conversation.turns):
                await asyncio.sleep(turn.pause_s / self._clients.faster)
                begun = time.perf_counter()
                head, body = await exchange(reader, writer, self._request(turn.completion_ids))
                self._held.latencies_s.append(time.perf_counter() - begun)
                self._held.begun += number == 0
                source = _SOURCE.search(head)
                self._held.extended += source is not None and source[1] == b"extended"
                self._add_turn(body, number)
            if self._clients.finish:
                path = f"/finish_session?session_id={quote(self._session)}"
                await exchange(reader, writer, http_request(path, self._headers, b""))
        finally:
            writer.close()

    def _opening(self) -> list[dict[str, str]]:
        """Equal for the conversations of a group; equal system messages for those of a family."""
        conversation = self._conversation
        alike = f"group {conversation.group}"
        if conversation.group is None:
            alike = f"opening {conversation.number}"
        question = conversation.opening_ids - conversation.system_ids
        family = random.Random(f"family {conversation.family}")
        return [
            {"role": "system", "content": self._words.text(family, conversation.system_ids)},
            {"role": "user", "content": self._words.text(random.Random(alike), question - 2 * _TEMPLATE_IDS)},
        ]

    def _request(self, completion_ids: int) -> bytes:
        messages = msgspec.Raw(b"[" + b",".join(self._messages) + b"]")
        fields = {"model": MODEL, "messages": messages, "tools": _TOOLS, "max_tokens": completion_ids}
        return http_request(CHAT, self._headers, msgspec.json.encode(fields))

    def _add_turn(self, body: bytes, number: int) -> None:
        completion = self._decoder.decode(body)
        message = completion.choices[0].message
        self._held.prompt_ids += completion.usage.prompt_tokens
        self._held.cached_ids += (completion.usage.prompt_tokens_details or {}).get("cached_tokens", 0)
        turns = self._conversation.turns
        if number + 1 == len(turns):
            return
        call = msgspec.json.decode(message, type=_Message).tool_calls[0]
        text = self._words.text(self._texts, max(1, turns[number + 1].appended_ids - 2 * _TEMPLATE_IDS))
        result = {"role": "tool", "tool_call_id": call.id, "content": text}
        self._messages += [bytes(message), msgspec.json.encode(result)]


async def exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> tuple[bytes, bytes]:
    """The head and the body of the response to a request.

    Raises:
        BadResponse: its status is not 200, or the connection was closed.
    """
    writer.write(request)
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head)
        body = await reader.readexactly(int(length[1]) if length else 0)
    except (asyncio.IncompleteReadError, OSError) as error:
        raise BadResponse(f"the connection was closed in the middle of a response: {error}") from error
    if b" 200 " not in head[:20]:
        raise BadResponse((head + body)[:700].decode("latin-1"))
    return head, body
