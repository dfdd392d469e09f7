"""A plain OpenAI client that holds long conversations: it sends all messages, and takes the answer."""

import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from benchmarks.author import TOOLS, Author, Messages
from benchmarks.cases import CHAT, HEADERS, MODEL, http_request
from benchmarks.load import BadAnswer

OPENING_TOKENS, RESULT_TOKENS = 300, 400
_FIRST_TOKENS, _STEP_TOKENS = 430, 610
"""About: a first prompt with its tools, and what each turn puts behind it."""
_READ = 1 << 18
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_TOOLS = msgspec.json.encode(TOOLS)


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer, and when: nanoseconds of CLOCK_MONOTONIC."""

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
        """The length of the prompt, as the proxy told it; 0 where the engine rendered it."""
        return int(self.headers.get("x-prompt-reused", 0)) + int(self.headers.get("x-prompt-appended", 0))

    def message(self) -> tuple[bytes, str]:
        """What was said, as a client sends it back, and the id of its tool call."""
        said = msgspec.json.decode(self.body)["choices"][0]["message"]
        kept = {name: value for name, value in said.items() if value is not None}
        return msgspec.json.encode(kept), kept["tool_calls"][0]["id"]


class Line:
    """One kept-alive connection, one request at a time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._socket: socket.socket | None = None

    def ask(self, request: bytes) -> Answered:
        """Send a request and read its answer.

        Raises:
            BadAnswer: the status is not 200, or the connection was closed.
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
                raise BadAnswer("the connection was closed in the middle of an answer")
            if not head:
                parts[0] += data
                found, _, behind = parts[0].partition(b"\r\n\r\n")
                length = _LENGTH.search(found + b"\r\n")
                if len(found) == len(parts[0]) or length is None:
                    continue
                head, parts, data, missing = found, [b""], behind, int(length[1])
            parts.append(data)
            missing -= len(data)
        end = time.perf_counter_ns()
        first, *lines = head.decode("latin-1").split("\r\n")
        if " 200 " not in first:
            raise BadAnswer(f"{first}: {b''.join(parts)[:500]!r}")
        pairs = (line.partition(": ") for line in lines)
        return Answered(start, end, {name.lower(): value for name, _, value in pairs}, b"".join(parts))

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation in which the model is to speak next: its messages as JSON."""

    messages: tuple[bytes, ...]

    @classmethod
    def begin(cls, author: Author) -> "Talk":
        """A system message and a question."""
        return cls(tuple(map(msgspec.json.encode, author.opening(OPENING_TOKENS))))

    @property
    def rendered(self) -> bool:
        """Whether nothing was sampled yet, so that somebody must render the prompt."""
        return len(self.messages) == 2

    def request(self, *, ids: bool = False) -> bytes:
        """The request for the next turn.

        Args:
            ids: whether the answer shall hold token ids.
        """
        fields = {"model": MODEL, "messages": msgspec.Raw(b"[" + b",".join(self.messages) + b"]")}
        extra: dict[str, Any] = {"return_token_ids": True} if ids else {}
        body = msgspec.json.encode({**fields, "tools": msgspec.Raw(_TOOLS), "max_tokens": 512, **extra})
        answer = "first" if self.rendered else "turn"
        return http_request(CHAT, {**HEADERS, "x-answer": answer}, body)

    def and_then(self, answered: Answered, author: Author) -> "Talk":
        """The conversation with an answer, and the result of the tool that it called."""
        said, call = answered.message()
        (result,) = author.result(RESULT_TOKENS, call)
        return Talk((*self.messages, said, msgspec.json.encode(result)))

    def parsed(self) -> Messages:
        """The messages as objects."""
        return [msgspec.json.decode(message) for message in self.messages]


def grown(line: Line, author: Author, tokens: int) -> Talk:
    """A conversation that was held over a line until the prompt after the next has about so many tokens.

    Raises:
        BadAnswer: the proxy did not keep it exact.
    """
    talk, length = Talk.begin(author), 0
    while max(length, _FIRST_TOKENS) + _STEP_TOKENS < tokens:
        answered = line.ask(talk.request())
        expect(answered, "rendered" if talk.rendered else "extended")
        talk = talk.and_then(answered, author)
        length = answered.prompt_tokens + _STEP_TOKENS
    return talk


def expect(answered: Answered, source: str) -> None:
    """See that the proxy made a prompt as it should.

    Raises:
        BadAnswer: it did not.
    """
    if answered.headers.get("x-prompt-source") != source:
        said = {name: value for name, value in answered.headers.items() if name.startswith("x-prompt-")}
        raise BadAnswer(f"a prompt should be {source}; the proxy says {said}")


def check_exact(line: Line, talk: Talk, render: Callable[[Messages], list[int]]) -> None:
    """Ask with ids, and compare them with a rendering of the messages, which nothing here makes drift.

    Raises:
        BadAnswer: they differ.
    """
    answered = line.ask(talk.request(ids=True))
    if msgspec.json.decode(answered.body)["prompt_token_ids"] != render(talk.parsed()):
        raise BadAnswer("the engine was sent another prompt than a rendering of the messages")
