"""A plain OpenAI client for long conversations: it sends all messages in every request."""

import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from benchmarks.author import TOOLS, Author, Messages
from benchmarks.cases import CHAT, HEADERS, MODEL, http_request
from benchmarks.load import BadResponse

OPENING_TOKENS, RESULT_TOKENS = 300, 400
_FIRST_TOKENS, _STEP_TOKENS = 430, 610
"""About: tokens of the first prompt with its tools, and tokens that each turn appends."""
_READ = 1 << 18
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_TOOLS = msgspec.json.encode(TOOLS)


@dataclass(frozen=True, slots=True)
class TimedResponse:
    """A response, with start and end of the request in nanoseconds of CLOCK_MONOTONIC."""

    start_ns: int
    end_ns: int
    headers: dict[str, str]
    body: bytes

    @property
    def ms(self) -> float:
        """Milliseconds from the first byte sent to the last byte received."""
        return (self.end_ns - self.start_ns) / 1e6

    @property
    def prompt_tokens(self) -> int:
        """The prompt's length from the proxy's headers; 0 if the engine rendered it."""
        return int(self.headers.get("x-prompt-reused", 0)) + int(self.headers.get("x-prompt-appended", 0))

    def message(self) -> tuple[bytes, str]:
        """The assistant message as JSON, as a client sends it back, and the id of its tool call."""
        message = msgspec.json.decode(self.body)["choices"][0]["message"]
        fields = {name: value for name, value in message.items() if value is not None}
        return msgspec.json.encode(fields), fields["tool_calls"][0]["id"]


class Connection:
    """One kept-alive connection, one request at a time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._socket: socket.socket | None = None

    def send(self, request: bytes) -> TimedResponse:
        """Send a request and read the response.

        Raises:
            BadResponse: the status is not 200, or the connection was closed.
        """
        if self._socket is None:
            self._socket = socket.create_connection(("127.0.0.1", self._port), timeout=60)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        start = time.perf_counter_ns()
        self._socket.sendall(request)
        parts, missing, head = [b""], 1, b""
        while missing > 0:
            data = self._socket.recv(_READ)
            if not data:
                raise BadResponse("the connection was closed in the middle of a response")
            if not head:
                parts[0] += data
                lines_of_head, _, body_start = parts[0].partition(b"\r\n\r\n")
                length = _LENGTH.search(lines_of_head + b"\r\n")
                if len(lines_of_head) == len(parts[0]) or length is None:
                    continue
                head, parts, data, missing = lines_of_head, [b""], body_start, int(length[1])
            parts.append(data)
            missing -= len(data)
        end = time.perf_counter_ns()
        first, *lines = head.decode("latin-1").split("\r\n")
        if " 200 " not in first:
            raise BadResponse(f"{first}: {b''.join(parts)[:500]!r}")
        pairs = (line.partition(": ") for line in lines)
        return TimedResponse(start, end, {name.lower(): value for name, _, value in pairs}, b"".join(parts))

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation whose next turn is the model's: its messages as JSON."""

    messages: tuple[bytes, ...]

    @classmethod
    def begin(cls, author: Author) -> "Conversation":
        """A new conversation: a system message and a question."""
        return cls(tuple(map(msgspec.json.encode, author.opening(OPENING_TOKENS))))

    @property
    def rendered(self) -> bool:
        """Whether the next turn is the first, whose prompt the engine renders."""
        return len(self.messages) == 2

    def request(self, *, ids: bool = False) -> bytes:
        """The request for the next turn.

        Args:
            ids: whether to request token ids.
        """
        fields = {"model": MODEL, "messages": msgspec.Raw(b"[" + b",".join(self.messages) + b"]")}
        extra: dict[str, Any] = {"return_token_ids": True} if ids else {}
        body = msgspec.json.encode({**fields, "tools": msgspec.Raw(_TOOLS), "max_tokens": 512, **extra})
        response = "first" if self.rendered else "turn"
        return http_request(CHAT, {**HEADERS, "x-response": response}, body)

    def with_turn(self, response: TimedResponse, author: Author) -> "Conversation":
        """The conversation with the response's message, and the result of its tool call."""
        message, call_id = response.message()
        (result,) = author.result(RESULT_TOKENS, call_id)
        return Conversation((*self.messages, message, msgspec.json.encode(result)))

    def parsed(self) -> Messages:
        """The messages as objects."""
        return [msgspec.json.decode(message) for message in self.messages]


def build_conversation(connection: Connection, author: Author, tokens: int) -> Conversation:
    """Hold a conversation until the prompt of the turn after the next has about `tokens` tokens.

    Raises:
        BadResponse: the proxy did not keep it exact.
    """
    conversation, length = Conversation.begin(author), 0
    while max(length, _FIRST_TOKENS) + _STEP_TOKENS < tokens:
        response = connection.send(conversation.request())
        expect(response, "rendered" if conversation.rendered else "extended")
        conversation = conversation.with_turn(response, author)
        length = response.prompt_tokens + _STEP_TOKENS
    return conversation


def expect(response: TimedResponse, source: str) -> None:
    """Check the source of the prompt in the proxy's headers.

    Raises:
        BadResponse: the source is another one.
    """
    if response.headers.get("x-prompt-source") != source:
        headers = {name: value for name, value in response.headers.items() if name.startswith("x-prompt-")}
        raise BadResponse(f"the prompt's source must be {source}, but the proxy returned {headers}")


def check_exact(
    connection: Connection, conversation: Conversation, render: Callable[[Messages], list[int]]
) -> None:
    """Compare the prompt's ids with a rendering of the messages: in these conversations both must be equal.

    Raises:
        BadResponse: they differ.
    """
    response = connection.send(conversation.request(ids=True))
    if msgspec.json.decode(response.body)["prompt_token_ids"] != render(conversation.parsed()):
        raise BadResponse("the prompt differs from a rendering of the messages")
