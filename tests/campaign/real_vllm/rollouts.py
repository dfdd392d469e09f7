"""Conversations as plain OpenAI clients hold them, and what the server recorded of them.

The SDK is used as it is. Each request has a connection of its own, so that the API server processes on
one port share the turns of a conversation. What is shown to be exact is compared in two ways: by the ids
that a client requested, and by the session's record, together with the engine's own counts.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest
from openai import AsyncOpenAI, AsyncStream, DefaultAsyncHttpxClient
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from proxy.demo.tools import TOOLS, call_tool

MODEL = "smollm2"
SERVED_BY = "x-served-by"
"""Where the hook of `open_client` puts the id of the process that answered."""

Message = dict[str, Any]
Habit = Callable[[Message], Message]
"""What a client does to messages before it sends them again."""


@dataclass
class Turn:
    """One choice of a completion, as far as its client saw it."""

    headers: Mapping[str, str]
    index: int
    message: Message = field(default_factory=dict)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    prompt_ids: list[int] = field(default_factory=list)
    """Empty unless requested, as are `ids` and `logprobs`."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The content, without tool calls and reasoning."""
        return self.message.get("content") or ""

    @property
    def source(self) -> str:
        """Source of the prompt, with the reason if there is one."""
        reason = self.headers.get("x-prompt-reason")
        return self.headers["x-prompt-source"] + (f": {reason}" if reason else "")


@dataclass
class Talk:
    """A conversation of a client that keeps nothing but messages."""

    client: AsyncOpenAI
    stream: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    """Of every request."""
    session: str | None = None
    """Sent as X-Session-ID."""
    habit: Habit = dict
    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    async def say(self, text: str, **options: Any) -> Turn:
        """The next turn: the results of the tools that the model called, then what the user says."""
        self.messages += self.results()
        self.messages.append(self.habit({"role": "user", "content": text}))
        return await self.go_on(**options)

    async def go_on(self, **options: Any) -> Turn:
        """The next turn on the messages as they are."""
        [turn] = await self.ask(**options)
        self.keep(turn)
        return turn

    def keep(self, turn: Turn) -> None:
        """Make a turn part of the conversation."""
        self.turns.append(turn)
        self.messages.append(self.habit(turn.message))

    def results(self) -> list[Message]:
        """What the tools answer that the last message calls."""
        calls = self.messages[-1].get("tool_calls") or [] if self.messages else []
        return [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": call_tool(call["function"]["name"], call["function"]["arguments"]),
            }
            for call in calls
        ]

    async def ask(self, headers: Mapping[str, str] | None = None, **options: Any) -> list[Turn]:
        """Send the messages; all choices that come back. The conversation stays as it is."""
        sent: dict[str, Any] = {"model": MODEL, "temperature": 1.2, "max_tokens": 12}
        sent |= {"messages": self.messages, "stream": self.stream, **self.options, **options}
        if self.session is not None:
            headers = {"X-Session-ID": self.session, **(headers or {})}
        if sent["stream"]:
            sent["stream_options"] = {"include_usage": True}
        raw = await self.client.chat.completions.with_raw_response.create(**sent, extra_headers=headers)
        if sent["stream"]:
            return await collect(cast(AsyncStream[ChatCompletionChunk], raw.parse()), raw.headers)
        return whole(cast(ChatCompletion, raw.parse()), raw.headers)


def whole(completion: ChatCompletion, headers: Mapping[str, str]) -> list[Turn]:
    """The choices of a completion; messages go back as the SDK's own objects would."""
    answer = completion.to_dict()
    turns = []
    for choice in cast(list[dict[str, Any]], answer["choices"]):
        turn = Turn(headers, choice["index"], choice["message"], usage=cast(dict[str, Any], answer["usage"]))
        _take(turn, answer, choice)
        turns.append(turn)
    return turns


async def collect(stream: AsyncStream[ChatCompletionChunk], headers: Mapping[str, str]) -> list[Turn]:
    """The choices of a stream, put together as applications do it."""
    turns: dict[int, Turn] = {}
    usage: dict[str, Any] = {}
    prompt: list[int] = []
    async for event in stream:
        chunk = event.to_dict()
        usage = cast(dict[str, Any], chunk.get("usage")) or usage
        prompt = cast(list[int], chunk.get("prompt_token_ids")) or prompt
        for choice in cast(list[dict[str, Any]], chunk["choices"]):
            message: Message = {"role": "assistant", "content": ""}
            turn = turns.setdefault(choice["index"], Turn(headers, choice["index"], message))
            add(turn.message, choice["delta"])
            _take(turn, chunk, choice)
    for turn in turns.values():
        turn.usage, turn.prompt_ids = usage, prompt
    return [turn for _, turn in sorted(turns.items())]


def add(message: Message, delta: Message) -> None:
    """Add a delta to what came before."""
    for name in ("content", "reasoning"):
        if delta.get(name):
            message[name] = message.get(name, "") + delta[name]
    for piece in delta.get("tool_calls") or []:
        calls = message.setdefault("tool_calls", [])
        if piece["index"] == len(calls):
            calls.append({"id": piece["id"], "type": "function", "function": {"name": "", "arguments": ""}})
        for name in ("name", "arguments"):
            calls[piece["index"]]["function"][name] += piece["function"].get(name) or ""


def _take(turn: Turn, answer: Mapping[str, Any], choice: Mapping[str, Any]) -> None:
    turn.prompt_ids = answer.get("prompt_token_ids") or turn.prompt_ids
    turn.ids += choice.get("token_ids") or []
    turn.logprobs += [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or []]
    turn.finish_reason = choice.get("finish_reason") or turn.finish_reason


def open_client(url: str, processes: Sequence[int] = ()) -> AsyncOpenAI:
    """An unmodified SDK client that makes a new connection for every request.

    Args:
        processes: those of the server; which of them answered is put into the header `SERVED_BY`.
    """

    async def note_process(response: httpx2.Response) -> None:
        stream = response.extensions["network_stream"]
        ours, theirs = stream.get_extra_info("client_addr"), stream.get_extra_info("server_addr")
        response.headers[SERVED_BY] = str(process_of_connection(theirs[1], ours[1], processes))

    http = DefaultAsyncHttpxClient(
        limits=httpx2.Limits(max_keepalive_connections=0),
        event_hooks={"response": [note_process]} if processes else {},
    )
    return AsyncOpenAI(base_url=url, api_key="none", http_client=http, max_retries=0, timeout=240)


def process_of_connection(port: int, client_port: int, processes: Sequence[int]) -> int | None:
    """Which process holds the server's end of an open connection, by the kernel's own table."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, *others = line.split()
        if (local[-4:], remote[-4:]) == (f"{port:04X}", f"{client_port:04X}"):
            socket = f"socket:[{others[6]}]"
            for process in processes:
                if any(_target(file) == socket for file in Path(f"/proc/{process}/fd").iterdir()):
                    return process
    return None


def _target(file: Path) -> str:
    with suppress(OSError):  # closed while we look
        return str(file.readlink())
    return ""


@dataclass(frozen=True)
class Record:
    """A session as its server shows it."""

    turns: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    refused: list[dict[str, Any]]

    def of(self, turn: Turn) -> dict[str, Any]:
        """What was recorded of a turn that a client saw."""
        request = turn.headers["x-turn-id"]
        [found] = [t for t in self.turns if (t["request"], t["choice"]) == (request, turn.index)]
        return found

    def path(self, last: dict[str, Any]) -> list[dict[str, Any]]:
        """A turn and all it continues, the first one first."""
        by_id = {turn["id"]: turn for turn in self.turns}
        path = [last]
        while path[-1]["parent"] is not None:
            path.append(by_id[path[-1]["parent"]])
        return path[::-1]

    def prompt(self, turn: dict[str, Any]) -> list[int]:
        """The whole prompt of a turn."""
        path = self.path(turn)
        before = [token for one in path[:-1] for token in one["appended_ids"] + one["completion_ids"]]
        return before + list(turn["appended_ids"])


async def record_of(client: AsyncOpenAI, session: str) -> Record:
    """The tree of a session, with ids, and the samples it makes."""
    root = re.sub(r"(/sessions/[^/]+)?/v1/?$", "", str(client.base_url))
    client = client.with_options(base_url=f"{root}/v1")
    tree = await client.get(f"/sessions/{session}?ids=true", cast_to=cast(Any, dict[str, Any]))
    made = await client.get(f"/sessions/{session}/samples", cast_to=cast(Any, dict[str, Any]))
    return Record(tree["turns"], made["samples"], made["refused"])


async def record(talk: Talk) -> Record:
    """What was recorded of a conversation, which is all in one session."""
    [session] = {turn.headers["x-session-id"] for turn in talk.turns}
    return await record_of(talk.client, session)


def check_seen(record: Record, turn: Turn) -> None:
    """What was recorded of a turn is what its client saw, and what the engine counted."""
    kept = record.of(turn)
    assert kept["problem"] is None, kept["problem"]
    assert kept["finish_reason"] == turn.finish_reason
    assert kept["source"] == turn.headers["x-prompt-source"]
    assert str(kept["reused"]) == turn.headers["x-prompt-reused"]
    prompt = record.prompt(kept)
    assert len(prompt) == kept["prompt_tokens"] == turn.usage["prompt_tokens"]
    assert len(kept["completion_ids"]) == len(kept["logprobs"]) == kept["completion_tokens"]
    if turn.prompt_ids:
        assert (turn.prompt_ids, turn.ids) == (prompt, kept["completion_ids"])
    if turn.logprobs:
        assert turn.logprobs == pytest.approx(kept["logprobs"], abs=1e-6)


def check_samples(record: Record) -> None:
    """Every sampled id is trained once, with its log-probability, and nothing else is."""
    assert record.refused == []
    for sample in record.samples:
        assert len(sample["completion_ids"]) == len(sample["loss_mask"]) == len(sample["logprobs"])
        [leaf] = [turn for turn in record.turns if turn["id"] == sample["leaf"]]
        path = record.path(leaf)
        assert sample["prompt_ids"] == path[0]["appended_ids"]
        assert sample["prompt_ids"] + sample["completion_ids"] == record.prompt(leaf) + leaf["completion_ids"]
        assert [span["id"] for span in sample["turns"]] == [turn["id"] for turn in path]
        expected: list[float | None] = []
        mask: list[int] = []
        for number, (turn, span) in enumerate(zip(path, sample["turns"], strict=True)):
            added = len(turn["appended_ids"]) if number else 0
            expected += [None] * added + turn["logprobs"]
            mask += [0] * added + [int(span["trained"])] * len(turn["completion_ids"])
        assert sample["loss_mask"] == mask
        assert sample["logprobs"] == expected
    trained = sum(sum(sample["loss_mask"]) for sample in record.samples)
    assert trained == sum(turn["completion_tokens"] for turn in record.turns)


def drifted(turns: Sequence[tuple[list[int], list[int]]]) -> int:
    """Follow-up turns whose prompt does not begin with all ids of the turn before."""
    return sum(
        after[: len(prompt) + len(ids)] != prompt + ids for (prompt, ids), (after, _) in pairwise(turns)
    )


def ids_of(record: Record, talk: Talk) -> list[tuple[list[int], list[int]]]:
    """Prompt and completion of each turn: as the client saw them, or else as they were recorded."""
    kept = [(turn, record.of(turn)) for turn in talk.turns]
    return [
        (turn.prompt_ids or record.prompt(recorded), turn.ids or list(recorded["completion_ids"]))
        for turn, recorded in kept
    ]


async def check_talk(talk: Talk) -> int:
    """Check all that was recorded of a conversation without forks; how many follow-up turns drifted."""
    kept = await record(talk)
    assert [turn["id"] for turn in kept.turns] == [kept.of(turn)["id"] for turn in talk.turns]
    assert [turn["parent"] for turn in kept.turns] == [None, *(turn["id"] for turn in kept.turns[:-1])]
    for turn in talk.turns:
        check_seen(kept, turn)
    check_samples(kept)
    assert len(kept.samples) == 1
    return drifted(ids_of(kept, talk))


TOOL_OPTIONS: dict[str, Any] = {"tools": list(TOOLS), "tool_choice": "required", "max_tokens": 64}
"""Of a turn in which the model must call a tool."""
