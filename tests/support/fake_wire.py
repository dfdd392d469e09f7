"""The chat format of a fake vLLM, and the scripts by which its generations go."""

import copy
import json
from collections.abc import Iterator, Sequence
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
    silent: tuple[Literal["ids", "logprobs", "prompt"], ...] = ()
    """What it leaves out though it was requested; generate without the prompt is that of vLLM 0.29."""
    echo: tuple[int, ...] | None = None
    """Ids it says the prompt had; None for the true ones."""
    miscounted: int = 0
    """By how much the number of sampled ids in `usage` is wrong."""
    mask: tuple[tuple[int, ...], ...] | None = None
    """For each position the ids that could be sampled there; generate alone returns it."""
    routed_experts: str | None = None
    """Returned with a choice's last event; the chat format has none."""
    pause_s: float = 0.0
    """Before each event of a stream."""
    hold_at: int | None = None
    """Wait for `release` before this event."""
    break_at: int | None = None
    """Break the connection instead of sending this event."""
    error_at: int | None = None
    """Report an error of the engine instead of this event of a stream, and end it."""
    done_at: int | None = None
    """End a stream in order instead of sending this event."""
    how: Literal["close", "reset", "head", "inside", "chunked"] = "close"
    """An orderly end, a TCP reset, an orderly end after the head of the answer or inside the event, and the
    last for an answer that does not announce its length."""

    def choices(self, n: int) -> list["Reply"]:
        """The script of each of n choices."""
        return [self, *self.others, *[self] * n][:n]

    @property
    def finish_reason(self) -> str:
        return self.finish or ("stop" if self.ids[-1:] == (END,) else "length")


class Asked:
    """What a request of any format asks for."""

    def __init__(self, body: dict[str, Any]) -> None:
        options = body.get("stream_options") or {}
        self.n: int = body.get("sampling_params", body).get("n") or 1
        self.ids = bool(body.get("return_token_ids"))
        self.usage = bool(options.get("include_usage"))
        """At the end of a stream."""
        self.running_usage = self.usage and bool(options.get("continuous_usage_stats"))
        """In each event too."""

    def echo(self, reply: Reply, prompt: Sequence[int]) -> list[int] | None:
        """The prompt as the engine says it was."""
        if not self.ids or "prompt" in reply.silent:
            return None
        return list(prompt if reply.echo is None else reply.echo)

    def sampled(self, reply: Reply, first: int = 0, end: int | None = None) -> list[int] | None:
        """The sampled ids of some positions."""
        return list(reply.ids[first:end]) if self.ids and "ids" not in reply.silent else None


def error_body(message: str, kind: str, param: str | None, code: int) -> bytes:
    """An error object as vLLM writes it."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return json.dumps({"error": error}, separators=(",", ":")).encode()


def usage_of(prompt: int, replies: Sequence[Reply]) -> dict[str, int]:
    """How many tokens there were in all choices."""
    return counts(prompt, sum(len(one.ids) + one.miscounted for one in replies))


def counts(prompt: int, sampled: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "total_tokens": prompt + sampled, "completion_tokens": sampled}


def completion_of(
    model: TinyModel, reply: Reply, prompt: Sequence[int], body: dict[str, Any]
) -> dict[str, Any]:
    """A whole completion."""
    asked = Asked(body)
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": model.decode(list(one.ids)), **one.message},
            "logprobs": _logprobs(one, one.ids, body),
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop,
            "token_ids": asked.sampled(one),
        }
        for index, one in enumerate(reply.choices(asked.n))
    ]
    return {
        "id": "chatcmpl-fake",
        "object": "chat.completion",
        "created": 1,
        "model": body.get("model") or "tiny",
        "choices": choices,
        "usage": usage_of(len(prompt), reply.choices(asked.n)),
        "prompt_token_ids": asked.echo(reply, prompt),
    }


def _logprobs(reply: Reply, ids: Sequence[int], body: dict[str, Any]) -> dict[str, Any] | None:
    if not body.get("logprobs") or "logprobs" in reply.silent:
        return None
    return {
        "content": [
            {"token": f"token_id:{token}", "logprob": -token / 8, "bytes": [], "top_logprobs": []}
            for token in ids
        ]
    }


def steps_of(reply: Reply, n: int) -> list[tuple[int, Reply, int]]:
    """What is sampled, in order: (index of the choice, its script, position of the id)."""
    scripts = list(enumerate(reply.choices(n)))
    longest = max(len(one.ids) for _, one in scripts)
    return [(index, one, at) for at in range(longest) for index, one in scripts if at < len(one.ids)]


def chunks_of(
    model: TinyModel, reply: Reply, prompt: Sequence[int], body: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """One chunk with the role and the prompt's ids, then one for each sampled token and choice."""
    asked = Asked(body)
    fixed = {"id": "chatcmpl-fake", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
    roles = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    head = {**fixed, "choices": [{"index": index, **roles} for index in range(asked.n)]}
    echo = {"prompt_token_ids": asked.echo(reply, prompt)} if asked.ids else {}
    yield {**head, **({"usage": counts(len(prompt), 0)} if asked.running_usage else {}), **echo}
    for index, one, at in steps_of(reply, asked.n):
        choice = {"index": index, **_piece_of(model, one, at)}
        if (ids := asked.sampled(one, at, at + 1)) is not None:
            choice["token_ids"] = ids
        choice["logprobs"] = _logprobs(one, [one.ids[at]], body)
        usage = {"usage": counts(len(prompt), at + 1 + one.miscounted)} if asked.running_usage else {}
        yield {**fixed, "choices": [choice], **usage}
    if asked.usage:
        yield {**fixed, "choices": [], "usage": usage_of(len(prompt), reply.choices(asked.n))}


def _piece_of(model: TinyModel, reply: Reply, at: int) -> dict[str, Any]:
    """The delta that comes with the id at a position, and how the choice ends if that is the last one."""
    delta: dict[str, Any] = {} if "content" in reply.message else {"content": model.decode([reply.ids[at]])}
    if reply.deltas:
        delta = reply.deltas[at]
    elif at == 0:
        delta |= first_delta(reply)
    if at < len(reply.ids) - 1:
        return {"delta": delta, "finish_reason": None}
    ending = {"stop_reason": reply.stop} if reply.stop is not None else {}
    return {"delta": delta, "finish_reason": reply.finish_reason, **ending}


def first_delta(reply: Reply) -> dict[str, Any]:
    """The message of a script as a delta: its calls are numbered."""
    calls = reply.message.get("tool_calls")
    numbered = {"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]} if calls else {}
    return {**reply.message, **numbered}


def label_weights(made: Sequence[dict[str, Any]], spans: list[dict[str, Any]]) -> None:
    """Add the spans of the weights to each choice that ends in a completion or in its chunks."""
    for choice in (choice for part in made for choice in part["choices"]):
        if choice["finish_reason"] is not None:
            choice["weight_versions"] = spans


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
