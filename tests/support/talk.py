"""A plain OpenAI client of the proxy, and what plain transformers says the engine must have been given."""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import httpx

from tests.support.fake_vllm import FakeVllm, Reply, as_rendered, data_of, tools_as_rendered
from tests.support.tiny_model import END, TinyModel
from tests.support.utils import Pair

CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"
Message = dict[str, Any]
_ROUND = [{"role": "user", "content": "."}, {"role": "assistant", "content": "."}]


def user(text: str) -> Message:
    """What a user says."""
    return {"role": "user", "content": text}


def call(name: str = "f", arguments: str = "{}", identity: str | None = None) -> Message:
    """A tool call, by default with an id as vLLM makes them."""
    function = {"name": name, "arguments": arguments}
    call_id = identity or f"chatcmpl-tool-{secrets.token_hex(16)}"
    return {"id": call_id, "type": "function", "function": function}


def result(of: Message, text: str) -> Message:
    """What a tool answered."""
    return {"role": "tool", "tool_call_id": of["id"], "content": text}


def appended_after(model: TinyModel, ids: Sequence[int], new: Sequence[Message], **kwargs: Any) -> list[int]:
    """The ids that are expected after `ids`: the close if it is missing, and the rendering of `new`."""
    whole = model.render(as_rendered([*_ROUND, *new]), **kwargs)
    before = model.render(as_rendered(_ROUND), **{**kwargs, "add_generation_prompt": False})
    return [*([] if ids[-1] == END else [END]), *whole[len(before) - 1 :]]


def sent_ids(fake: FakeVllm) -> list[int] | None:
    """The exact prompt of the last generation; None if the engine rendered messages."""
    for seen in reversed(fake.requests):
        if seen.path == GENERATE and seen.json["sampling_params"].get("max_tokens") != 1:
            ids: list[int] = seen.json["token_ids"]
            return ids
        if seen.path == CHAT and seen.json.get("max_tokens") != 1:
            given: list[int] | None = (seen.json.get("kv_transfer_params") or {}).get("prompt_token_ids")
            return given
    raise AssertionError("nothing was generated")


@dataclass
class Answered:
    """An answer of the chat route."""

    response: httpx.Response
    sent: list[int] | None = None
    """Ids that a fake engine was given; None if it was given messages."""

    @property
    def messages(self) -> list[Message]:
        """The message of each choice, as an SDK puts it together."""
        return assembled(self.response)

    @property
    def message(self) -> Message:
        """Of the first choice."""
        return self.messages[0]

    @property
    def prompt(self) -> dict[str, str]:
        """The X-Prompt headers of the response, by their names without that prefix."""
        headers = self.response.headers.items()
        return {name[9:]: value for name, value in headers if name.startswith("x-prompt-")}

    @property
    def reason(self) -> str:
        """Why the prompt is no extension; "" if it is one."""
        return self.prompt.get("reason", "")

    @property
    def source(self) -> str:
        """Source of the prompt, with the reason if there is one."""
        return self.prompt["source"] + (f": {self.reason}" if self.reason else "")

    @property
    def session(self) -> str:
        """The rollout it belongs to."""
        return str(self.response.headers["x-session-id"])

    @property
    def turn(self) -> str:
        """The turn's id."""
        return str(self.response.headers["x-turn-id"])

    @property
    def prompt_ids(self) -> list[int]:
        """What the engine consumed, if the request asks for ids."""
        ids: list[int] = self._parts[0]["prompt_token_ids"]
        return ids

    @property
    def ids(self) -> list[int]:
        """What the engine sampled, if the request asks for ids."""
        return [token for part in self._parts for token in part["choices"][0].get("token_ids") or ()]

    @property
    def finish(self) -> str | None:
        """Why the first choice ended."""
        return next(filter(None, (part["choices"][0].get("finish_reason") for part in self._parts)), None)

    @property
    def _parts(self) -> list[dict[str, Any]]:
        """The events of a stream that have choices, or the whole body."""
        if not self.response.headers["content-type"].startswith("text/event-stream"):
            return [self.response.json()]
        return [event for event in data_of(self.response.content) if event["choices"]]

    def continues(self, before: "Answered") -> bool:
        """Whether the prompt begins with all that was consumed and sampled before."""
        ids = [*before.prompt_ids, *before.ids]
        return self.source.startswith("extended") and self.prompt_ids[: len(ids)] == ids


@dataclass
class Conversation:
    """A conversation as a client holds it: messages only."""

    client: httpx.Client
    messages: list[Message]
    fields: dict[str, Any] = field(default_factory=dict)
    """Of each request."""
    headers: dict[str, str] = field(default_factory=dict)
    usual: ClassVar[dict[str, Any]] = {"return_token_ids": True}

    def ask(self, *new: Message, path: str = CHAT, stream: bool = False, **fields: Any) -> Answered:
        """Say something, and keep the answer as an SDK gives it."""
        self.messages = [*self.messages, *new]
        streamed = {"stream": True} if stream else {}
        body = {"messages": self.messages, **self.usual, **self.fields, **fields, **streamed}
        response = self.client.post(path, json=body, headers=self.headers)
        assert response.status_code == 200, response.text
        answered = Answered(response)
        self.messages.append(answered.message)
        return answered


class Talk(Conversation):
    """A conversation with a fake engine. The first text is nobody else's, because tests share one store."""

    usual: ClassVar[dict[str, Any]] = {}

    def __init__(
        self, pair: Pair, model: TinyModel, messages: list[Message] | None = None, **options: Any
    ) -> None:
        super().__init__(pair.client, messages or [user(f"Hi {secrets.token_hex(6)}")], **options)
        self.pair = pair
        self.model = model
        self.ids: list[int] = []
        """Prompt and completion of the last turn, as the engine consumed and sampled them."""

    def ask(self, *new: Message, reply: Reply | None = None, **asking: Any) -> Answered:
        """Say something that the engine answers by a script."""
        script = reply or Reply()
        self.pair.fake.replies.append(script)
        answered = super().ask(*new, **asking)
        self.pair.fake.replies.clear()
        answered.sent = sent_ids(self.pair.fake)
        self.ids = [*(answered.sent or self.rendered(json.loads(answered.response.request.content)))]
        self.ids += script.ids
        return answered

    def rendered(self, body: dict[str, Any]) -> list[int]:
        """What the engine makes of a request itself."""
        kwargs = dict(body.get("chat_template_kwargs") or {})
        if body.get("continue_final_message"):
            kwargs |= {"continue_final_message": True, "add_generation_prompt": False}
        return self.model.render(
            as_rendered(body["messages"]), tools=tools_as_rendered(body.get("tools")), **kwargs
        )

    def follow(self, *new: Message, expected: Sequence[int] | None = None, **asking: Any) -> Answered:
        """Say something, which must go on from `expected`, by default the ids of the last turn."""
        before = list(self.ids if expected is None else expected)
        fields = {**self.fields, **asking}
        kwargs = fields.get("chat_template_kwargs") or {}
        added = appended_after(self.model, before, new, tools=fields.get("tools"), **kwargs)
        answered = self.ask(*new, **asking)
        assert answered.sent == [*before, *added], answered.prompt
        assert answered.prompt["source"] == "extended"
        assert (answered.prompt["reused"], answered.prompt["appended"]) == (str(len(before)), str(len(added)))
        return answered


def assembled(response: httpx.Response) -> list[Message]:
    """The messages of an answer, without the fields that vLLM leaves empty."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        messages = [choice["message"] for choice in response.json()["choices"]]
        return [{key: value for key, value in each.items() if value or key == "content"} for each in messages]
    made: dict[int, Message] = {}
    for chunk in data_of(response.content):
        for choice in chunk["choices"]:
            message = made.setdefault(choice["index"], {"role": "assistant", "content": None})
            add_delta(message, choice["delta"])
    return [message for _, message in sorted(made.items())]


def add_delta(message: Message, delta: Message) -> None:
    """Add a delta, or a whole message, to what came before."""
    for name in ("content", "reasoning"):
        if delta.get(name) is not None:
            message[name] = (message.get(name) or "") + delta[name]
    for position, piece in enumerate(delta.get("tool_calls") or []):
        calls = message.setdefault("tool_calls", [])
        index = piece.get("index", position)
        if index == len(calls):
            calls.append({"id": piece["id"], "type": "function", "function": {"name": "", "arguments": ""}})
        for name in ("name", "arguments"):
            calls[index]["function"][name] += piece["function"].get(name) or ""
