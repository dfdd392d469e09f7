"""Clients of `simulate.py`: plain OpenAI clients that run the rollouts of a case, and name their sessions."""

import asyncio
import re
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
import uvloop

from benchmarks.cases import CHAT, http_request
from benchmarks.gateway_answers import MODEL, Answer
from benchmarks.gateway_loads import CLIENT_HEADERS, Corpus
from benchmarks.load import BadResponse
from benchmarks.scale_case import MESSAGE_IDS, Case
from tokenization import ChatTokenizer

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_SOURCE = re.compile(rb"\r\nx-prompt-source: *(\w+)", re.IGNORECASE)
_NUMBER, _STEP = b"7000001", b"8000001"
"""Stand in texts for the numbers of the rollout and of the turn; all numbers have seven digits."""
_FIRST = 1_000_000
_SYSTEM = "You fix bugs in a Python repository. Read its sources, then explain."
_LIMIT = 1 << 20
_ENDING = b"\r\n0\r\n\r\n"
_SETTLE_S = 0.02


@dataclass(frozen=True, slots=True)
class Script:
    """What the rollouts of a case send, and what they are answered."""

    opening: bytes
    """JSON of the first messages, without the brackets."""
    answer: bytes
    """JSON of the assistant's message."""
    step: bytes
    """JSON of the message that each further turn appends."""
    canned: Answer
    """The engine's answer to every request, with the ids of the first prompt."""


def write_script(case: Case, tokenizer: ChatTokenizer, corpus: Corpus) -> Script:
    """Write the texts of a case. An opening of many ids is a history of questions and answers.

    Raises:
        StartError: the corpus has no more text.
    """
    number = _NUMBER.decode()
    messages: list[dict[str, str]] = [{"role": "system", "content": _SYSTEM}]
    left = case.opening_ids - 30
    while left > 0:
        exchange = 600 if left > 1200 else left
        question = exchange if exchange < 600 else 400
        asked = corpus.text(max(2, question - MESSAGE_IDS))
        messages.append({"role": "user", "content": f"{number}: {asked}"})
        if question < exchange:
            text = corpus.text(exchange - question - MESSAGE_IDS)
            messages.append({"role": "assistant", "content": f"{number}: {text}"})
        left -= exchange
    if messages[-1]["role"] == "assistant":
        messages.append({"role": "user", "content": number})
    sampled = corpus.take(case.completion_ids - 1)
    stop = tokenizer.stop_id()
    canned = Answer(
        tokenizer.render(messages), [*(token for token, _ in sampled), stop], [text for _, text in sampled]
    )
    new = f"{number}.{_STEP.decode()}: {corpus.text(max(2, case.appended_ids - 2 * MESSAGE_IDS))}"
    return Script(
        msgspec.json.encode(messages)[1:-1],
        msgspec.json.encode({"role": "assistant", "content": canned.text}),
        msgspec.json.encode({"role": "user", "content": new}),
        canned,
    )


@dataclass(slots=True)
class Run:
    """What the clients saw."""

    seconds: float = 0.0
    """From the first request to the last response."""
    latencies_s: list[float] = field(default_factory=list)
    """Of each turn."""
    turns: int = 0
    extended: int = 0
    """Turns whose prompts continue recorded ids: all but the first of each rollout."""
    sent_bytes: int = 0
    received_bytes: int = 0
    cpu_s: float = 0.0
    """CPU seconds of the clients."""


class Clients:
    """Runs the rollouts of a case. Each call of `run` takes some turns of all of them."""

    def __init__(self, case: Case, script: Script, port: int, first: int) -> None:
        """`first`: number of the first rollout, so that no two runs in front of one proxy share a rollout."""
        self._talks = [Talk(case, script, port, first + number, number) for number in range(case.rollouts)]
        self._turns = case.turns

    def run(self, turns: int = 0) -> Run:
        """Take this number of turns of each rollout; 0 for all that are left.

        Raises:
            BadResponse: a status is not 200, or a connection was closed.
        """
        return uvloop.run(self._run(turns or self._turns))

    async def _run(self, turns: int) -> Run:
        run = Run()
        await asyncio.gather(*(talk.connect() for talk in self._talks))
        try:
            await asyncio.sleep(_SETTLE_S)
            cpu_s, start = time.process_time(), time.perf_counter()
            await asyncio.gather(*(talk.take(turns, run) for talk in self._talks))
            run.seconds, run.cpu_s = time.perf_counter() - start, time.process_time() - cpu_s
        finally:
            for talk in self._talks:
                talk.close()
        return run


class Talk:
    """One rollout on one connection."""

    def __init__(self, case: Case, script: Script, port: int, number: int, place: int) -> None:
        self._case, self._script, self._port = case, script, port
        self._name = b"%d" % (_FIRST + number)
        self._thinks = case.thinks(place)
        self._taken = 0
        self._headers = {**CLIENT_HEADERS, "x-session-id": f"rollout-{number}"}
        self._messages = bytearray(script.opening.replace(_NUMBER, self._name))
        more: dict[str, Any] = {"max_tokens": case.completion_ids, "stream": case.stream}
        self._opening = msgspec.json.encode({"model": MODEL})[:-1] + b',"messages":['
        self._closing = b"]," + msgspec.json.encode(more)[1:]

    async def connect(self) -> None:
        """Open the connection."""
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=_LIMIT)

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()

    async def take(self, turns: int, run: Run) -> None:
        """Take the next turns.

        Raises:
            BadResponse: a status is not 200, or the connection was closed.
        """
        for _ in range(min(turns, self._case.turns - self._taken)):
            if self._taken:
                number = b"%d" % (_FIRST + self._taken)
                step = self._script.step.replace(_NUMBER, self._name).replace(_STEP, number)
                self._messages += b"," + self._script.answer + b"," + step
            body = b"".join((self._opening, self._messages, self._closing))
            request = http_request(CHAT, self._headers, body)
            await asyncio.sleep(next(self._thinks))
            begun = time.perf_counter()
            self._writer.write(request)
            head, received = await self._read()
            run.latencies_s.append(time.perf_counter() - begun)
            self._taken += 1
            run.turns += 1
            run.sent_bytes += len(request)
            run.received_bytes += received
            source = _SOURCE.search(head)
            run.extended += source is not None and source[1] == b"extended"

    async def _read(self) -> tuple[bytes, int]:
        """The head of a response, and the bytes of all of it."""
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in head[:20]:
                raise BadResponse((head + await self._reader.read(700)).decode("latin-1"))
            if (length := _LENGTH.search(head)) is not None:
                return head, len(head) + len(await self._reader.readexactly(int(length[1])))
            received, tail = len(head), b"\r\n"
            while tail != _ENDING:
                data = await self._reader.read(1 << 16)
                if not data:
                    raise BadResponse("the connection was closed in the middle of a stream")
                received += len(data)
                tail = (tail + data)[-len(_ENDING) :]
        except (asyncio.IncompleteReadError, OSError) as error:
            raise BadResponse(f"the connection was closed in the middle of a response: {error}") from error
        return head, received
