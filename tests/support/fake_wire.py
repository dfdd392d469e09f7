"""The wire formats of a fake vLLM, and the scripts by which its generations go."""

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.support.tiny_model import END, HI, TinyModel


@dataclass
class Canned:
    """A fixed answer for a path."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Reply:
    """How one generation goes. In a stream, positions count events; a whole answer is one event, number 0."""

    ids: tuple[int, ...] = (*HI, END)
    """What is sampled: "hi" and the stop token."""
    others: tuple["Reply", ...] = ()
    """How the further choices go, where n > 1; those without a script go like this one."""
    one_by_one: bool = False
    """Stream a choice when the one before has ended, instead of all side by side."""
    error: Canned | None = None
    """Answered instead of a completion."""
    message: dict[str, Any] = field(default_factory=dict)
    """Put into the message, or into the first delta; its content stands in place of the text of the ids."""
    deltas: tuple[dict[str, Any], ...] = ()
    """Of each id of a stream, in place of its text and of `message`."""
    finish: str | None = None
    """The finish reason; None for "stop" after the stop token and "length" elsewhere."""
    stop: str | int | None = None
    """The stop reason."""
    silent: tuple[Literal["prompt", "ids", "logprobs"], ...] = ()
    """What the engine does not say though it was asked."""
    echo: tuple[int, ...] | None = None
    """Ids it says the prompt had; None for the true ones."""
    miscounted: int = 0
    """By how much the number of sampled ids in `usage` is wrong."""
    lost_ids: tuple[int, ...] = ()
    """Positions whose ids are missing from the answer."""
    mask: tuple[tuple[int, ...], ...] | None = None
    """For each position the ids that could be sampled there; generate alone returns it."""
    routed_experts: str | None = None
    """Returned with a choice's last event."""
    logprobs_short: int = 0
    """How many log-probabilities are missing."""
    pause_s: float = 0.0
    """Before each event of a stream."""
    hold_at: int | None = None
    """Wait for `release` before this event."""
    break_at: int | None = None
    """Break the connection instead of sending this event."""
    drip_s: float = 0.0
    """Send byte by byte, and wait this long before each."""
    how: Literal["close", "reset", "head", "inside", "chunked"] = "close"
    """An orderly end, a TCP reset, an orderly end after the head of the answer or inside the event, and the
    last for an answer that does not announce its length."""

    def choices(self, n: int) -> list["Reply"]:
        """The script of each of n choices."""
        return [self, *self.others, *[self] * n][:n]

    @property
    def finish_reason(self) -> str:
        """How it ends."""
        return self.finish or ("stop" if self.ids[-1:] == (END,) else "length")

    @property
    def told(self) -> list[int]:
        """The ids that it says were sampled."""
        return [token for position, token in enumerate(self.ids) if position not in self.lost_ids]


def error_body(message: str, kind: str, param: str | None, code: int) -> bytes:
    """An error object as vLLM writes it."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return json.dumps({"error": error}, separators=(",", ":")).encode()


def choice_of(
    model: TinyModel, index: int, reply: Reply, with_ids: bool, logprobs: bool = False
) -> dict[str, Any]:
    """One choice of a whole completion."""
    ids = list(reply.ids)
    return {
        "index": index,
        "message": {"role": "assistant", "content": model.decode(ids), **reply.message},
        "logprobs": _logprobs(reply, ids) if logprobs and "logprobs" not in reply.silent else None,
        "finish_reason": reply.finish_reason,
        "stop_reason": reply.stop,
        "token_ids": reply.told if with_ids and "ids" not in reply.silent else None,
        **({"routed_experts": reply.routed_experts} if reply.routed_experts is not None else {}),
    }


def completion_of(choices: list[dict[str, Any]], prompt: int, reply: Reply, model: str) -> dict[str, Any]:
    """A whole completion."""
    return {
        "id": "chatcmpl-fake",
        "object": "chat.completion",
        "created": 1,
        "model": model,
        "choices": choices,
        "usage": usage_of(prompt, reply, len(choices)),
    }


def echoed(reply: Reply, prompt: list[int]) -> list[int] | None:
    """The prompt as the engine says it was."""
    if "prompt" in reply.silent:
        return None
    return prompt if reply.echo is None else list(reply.echo)


def _logprobs(reply: Reply, ids: list[int]) -> dict[str, Any]:
    """Of each id, as vLLM writes them; `Reply.logprobs_short` leaves some out."""
    return {
        "content": [
            {"token": f"token_id:{token}", "logprob": -token / 8, "bytes": [], "top_logprobs": []}
            for token in ids[: len(ids) - reply.logprobs_short]
        ]
    }


def steps_of(reply: Reply, n: int) -> list[list[tuple[int, Reply, int]]]:
    """What is sampled together: lists of (index of the choice, its script, position of the id)."""
    scripts = list(enumerate(reply.choices(n)))
    if reply.one_by_one:
        return [[(index, one, at)] for index, one in scripts for at in range(len(one.ids))]
    longest = max(len(one.ids) for _, one in scripts)
    return [[(i, one, at) for i, one in scripts if at < len(one.ids)] for at in range(longest)]


def chunks_of(
    model: TinyModel, reply: Reply, prompt: list[int], asked: dict[str, Any]
) -> list[dict[str, Any]]:
    """One chunk with the role and the prompt's ids, then one for each sampled token and choice."""
    n, with_ids, options = (
        asked.get("n") or 1,
        asked.get("return_token_ids"),
        asked.get("stream_options") or {},
    )
    running = options.get("include_usage") and options.get("continuous_usage_stats")
    roles = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    head: dict[str, Any] = {"choices": [{"index": index, **roles} for index in range(n)]}
    if running:
        head["usage"] = _usage(len(prompt), 0)
    if with_ids:
        head["prompt_token_ids"] = echoed(reply, prompt)
    chunks = [head]
    for step in steps_of(reply, n):
        for index, one, at in step:
            choice = {"index": index, **piece_of(model, one, at)}
            if with_ids and "ids" not in one.silent:
                choice["token_ids"] = None if at in one.lost_ids else [one.ids[at]]
            shown = asked.get("logprobs") and "logprobs" not in one.silent
            choice["logprobs"] = _logprobs(one, [one.ids[at]]) if shown else None
            usage = {"usage": _usage(len(prompt), at + 1 + one.miscounted)} if running else {}
            chunks.append({"choices": [choice], **usage})
    if options.get("include_usage"):
        chunks.append({"choices": [], "usage": usage_of(len(prompt), reply, n)})
    fixed = {"id": "chatcmpl-fake", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
    return [{**fixed, **chunk} for chunk in chunks]


def piece_of(model: TinyModel, reply: Reply, at: int) -> dict[str, Any]:
    """The delta that comes with the id at a position, and how the choice ends if that is the last one."""
    delta: dict[str, Any] = {} if "content" in reply.message else {"content": model.decode([reply.ids[at]])}
    if reply.deltas:
        delta = reply.deltas[at]
    elif at == 0:
        calls = reply.message.get("tool_calls")
        numbered = {"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]} if calls else {}
        delta |= {**reply.message, **numbered}
    if at < len(reply.ids) - 1:
        return {"delta": delta, "finish_reason": None}
    ending = {"stop_reason": reply.stop} if reply.stop is not None else {}
    return {"delta": delta, "finish_reason": reply.finish_reason, **ending}


def usage_of(prompt: int, reply: Reply, n: int) -> dict[str, int]:
    """How many tokens there were in all choices."""
    return _usage(prompt, sum(len(one.ids) for one in reply.choices(n)) + reply.miscounted)


def _usage(prompt: int, sampled: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def event_of(value: object) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def data_of(stream: bytes) -> Iterator[Any]:
    """The parsed data of each event of a stream, without the last `[DONE]`."""
    for event in stream.split(b"\n\n"):
        if event and event != b"data: [DONE]":
            yield json.loads(event.removeprefix(b"data: "))


def as_rendered(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as vLLM hands them to a template: texts are strings, arguments of tool calls are objects.

    The template is one that loops over no content and does not know the role `developer`.
    """
    messages = copy.deepcopy(messages)
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = "\n".join(part["text"] for part in content if "text" in part)
        message["content"] = content or ""
        for call in message.get("tool_calls") or []:
            arguments = call["function"].get("arguments") or {}
            call["function"]["arguments"] = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not any(message["role"] == "developer" for message in messages):
        return messages
    system = [message["content"] for message in messages if message["role"] in ("system", "developer")]
    others = [message for message in messages if message["role"] not in ("system", "developer")]
    return [{"role": "system", "content": "\n\n".join(filter(None, system))}, *others]


def tools_as_rendered(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools as vLLM hands them to a template: unset fields are null, unknown ones are dropped."""
    if tools is None:
        return None
    fields = ("name", "description", "parameters")
    functions = [tool.get("function") for tool in tools]
    return [
        {"type": "function", "function": {name: function.get(name) for name in fields}} if function else tool
        for tool, function in zip(tools, functions, strict=True)
    ]
