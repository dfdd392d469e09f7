"""One conversation of four turns in each wire format, as a client of that format holds it."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import httpx

from tests.support.talk import CHAT, GENERATE, add_delta, user

TOKENS = f"{CHAT}/tokens"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
MODEL = "smollm2"
TURNS = 4
Fields = dict[str, Any]

_WORDS = ("Look around.", "Go  on, please.\n", "Größer, 日本語 🙂?", " why\tso? ")
"""What the user says in each turn."""
_SCHEMA: Fields = {
    "type": "object",
    "properties": {"where": {"type": "string", "enum": ["here", "there"]}},
    "required": ["where"],
    "additionalProperties": False,
}
_LOOK: Fields = {"name": "look", "description": "Looks.", "strict": True}
CHAT_TOOL: Fields = {"type": "function", "function": {**_LOOK, "parameters": _SCHEMA}}
CALL_TOKENS, TURN_TOKENS = 64, 8
_SKIPPED = frozenset(range(17)) - {11, 12}
"""Special tokens of the engines' checkpoint: decoders skip them. Its marks of reasoning are none."""
_SAMPLING = {"temperature": 1.3}


def stream_of(response: httpx.Response) -> Iterator[Fields]:
    """The JSON events of a stream as they arrive."""
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def events_of(response: httpx.Response) -> list[Fields]:
    """The JSON events of a stream; the one object of any other answer."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        return [response.json()]
    return list(stream_of(response))


@dataclass
class Seen:
    """What a client saw of one turn."""

    headers: Mapping[str, str]
    prompt_tokens: int | None = None
    """The engine's count, as `completion_tokens`; None where the format has none."""
    completion_tokens: int | None = None
    prompt_ids: list[int] | None = None
    """The engine's echo; None where the format has no ids."""
    ids: list[int] = field(default_factory=list)
    sent: list[int] | None = None
    """The prompt as the client gave it; None where it gave messages."""


class Conversation(ABC):
    """What a client does in one format: it makes a request of what it keeps, and keeps what it needs."""

    path: ClassVar[str]
    sources: ClassVar[Sequence[str]] = ("rendered: first_turn", *["extended"] * (TURNS - 1))
    """Source of each prompt, with the reason if there is one."""
    streams = has_headers = True
    names_session = True
    """Whether a header names the session; if not, the conversation is recognised, or the path names it."""

    def __init__(self, name: str) -> None:
        """`name`: one that no other conversation has; it is in the first message."""
        self.name = name
        self.seen: list[Seen] = []
        self.messages: list[Fields] = []
        """What a client of messages or items keeps."""

    def ask(self, http: httpx.Client) -> None:
        """The next turn. The third is not streamed."""
        turn = len(self.seen)
        stream = {"stream": True} if self.streams and turn != 2 else {}
        body = {"model": MODEL, **_SAMPLING, **self.body(turn), **stream}
        headers = {"x-session-id": self.name} if self.names_session else {}
        response = http.post(self.path, json=body, headers=headers)
        assert response.status_code == 200, response.text
        seen = Seen(response.headers)
        self.read(events_of(response), seen)
        self.seen.append(seen)

    def session(self) -> str:
        """The session of all its turns. The answer to a batch has no headers of one."""
        if not self.has_headers:
            return self.name
        [session] = {seen.headers["x-session-id"] for seen in self.seen}
        return session

    @abstractmethod
    def body(self, turn: int) -> Fields:
        """The fields of a request."""

    @abstractmethod
    def read(self, events: Sequence[Fields], seen: Seen) -> None:
        """Take what the client sees, and what it needs for its next turn."""


class Chat(Conversation):
    """The chat route, with a forced tool call, and no session named."""

    path = CHAT
    names_session = False
    calls = True

    def new_messages(self, turn: int) -> list[Fields]:
        """The results of the calls of the last turn, and what the user says."""
        calls = self.messages[-1].get("tool_calls") or [] if self.messages else []
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "A tree."} for call in calls]
        return [*results, user(f"{_WORDS[turn]} {'' if turn else self.name}")]

    def options(self, turn: int) -> Fields:
        tools = {"tools": [CHAT_TOOL], "tool_choice": "none" if turn else "required"}
        # the call is greedy: the shortest spelling of its JSON, which the limit does not cut
        size: Fields = {"max_tokens": TURN_TOKENS} if turn else {"max_tokens": CALL_TOKENS, "temperature": 0}
        usage = {"stream_options": {"include_usage": True}} if turn != 2 else {}
        return {**tools, **size, **usage, "return_token_ids": True}

    def body(self, turn: int) -> Fields:
        self.messages += self.new_messages(turn)
        return {"messages": self.messages, **self.options(turn)}

    def read(self, events: Sequence[Fields], seen: Seen) -> None:
        """The message, put together as applications do it."""
        message: Fields = {"role": "assistant", "content": ""}
        for event in events:
            _take(seen, event)
            for choice in event["choices"]:
                add_delta(message, choice["delta"] if "delta" in choice else choice["message"])
        self.messages.append(message)
        if not len(self.seen) and self.calls:
            assert message.get("tool_calls"), message


class Reasoning(Chat):
    """The chat route where the engine parses reasoning, which the client sends back."""

    names_session = True
    calls = False

    def options(self, turn: int) -> Fields:
        """What turns the engine's parser on. A turn that begins with a stop token would have no reasoning."""
        kwargs = {"chat_template_kwargs": {"thinking": True}, "min_tokens": 1}
        options = {**super().options(turn), **kwargs, "max_tokens": TURN_TOKENS}
        return {name: value for name, value in options.items() if not name.startswith("tool")}

    def read(self, events: Sequence[Fields], seen: Seen) -> None:
        """There is always reasoning: this model does not end it."""
        super().read(events, seen)
        assert self.messages[-1].get("reasoning"), self.messages[-1]


class Tokens(Chat):
    """The token route: the client sends back ids, and only the new messages."""

    path = TOKENS
    names_session = True
    sources = ("rendered: no_ids", *["extended"] * (TURNS - 1))

    def body(self, turn: int) -> Fields:
        """Messages at first, later all ids so far and what to append."""
        new = self.new_messages(turn)
        if not turn:
            return {"messages": new, **self.options(turn)}
        last = self.seen[-1]
        return {
            "prompt_ids": [*(last.prompt_ids or []), *last.ids],
            "append_messages": new,
            **self.options(turn),
        }


class Completions(Conversation):
    """The completions route with ids; the client appends ids of its own."""

    path = COMPLETIONS
    sources = ("given: ids_given",) * TURNS
    _first = range(1000, 1012)
    _appended: ClassVar[list[int]] = [198, 1, 4093, 198]

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._sent: list[int] = []
        """The last prompt: an engine may echo none, as generate does up to vLLM 0.29."""

    def prompt(self) -> list[int]:
        """The ids of the next turn. The first begin with the name's, so that no other prompt has them."""
        if not self.seen:
            self._sent = [*(1000 + letter for letter in self.name.encode()), *self._first]
        else:
            self._sent = [*self._sent, *self.seen[-1].ids, *self._appended]
        return self._sent

    def body(self, turn: int) -> Fields:
        usage = {"stream_options": {"include_usage": True}} if turn != 2 else {}
        return {"prompt": self.prompt(), "max_tokens": TURN_TOKENS, "return_token_ids": True, **usage}

    def read(self, events: Sequence[Fields], seen: Seen) -> None:
        seen.sent = self._sent
        for event in events:
            _take(seen, event)


class Generate(Completions):
    """The generate route; no session is named."""

    path = GENERATE
    names_session = False

    def body(self, turn: int) -> Fields:
        sampling = {"max_tokens": TURN_TOKENS, **_SAMPLING}
        return {"token_ids": self.prompt(), "sampling_params": sampling, "return_token_ids": True}


class Trl(Chat):
    """The chat route of TRL's own server; its client gets no text, and asks for it."""

    path = "/chat/"
    names_session = True
    streams = has_headers = calls = False

    def ask(self, http: httpx.Client) -> None:
        """The next turn, and its text."""
        super().ask(http)
        shown = [token for token in self.seen[-1].ids if token not in _SKIPPED]
        text = http.post("/detokenize", json={"model": MODEL, "tokens": shown}).json()["prompt"]
        self.messages.append({"role": "assistant", "content": text})

    def body(self, turn: int) -> Fields:
        self.messages += self.new_messages(turn)
        # greedy: of bytes that are no text, its chat answer and its decoder show different replacements
        return {"messages": [self.messages], "max_tokens": TURN_TOKENS, "temperature": 0}

    def read(self, events: Sequence[Fields], seen: Seen) -> None:
        [answer] = events
        [seen.prompt_ids], [seen.ids] = answer["prompt_ids"], answer["completion_ids"]


class Messages(Conversation):
    """Anthropic's messages, with a forced tool call, in the session of the base URL."""

    names_session = False

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.path = f"/sessions/{name}{MESSAGES}"  # type: ignore[misc]

    def body(self, turn: int) -> Fields:
        used = (
            [block for block in self.messages[-1]["content"] if block["type"] == "tool_use"] if turn else []
        )
        results = [{"type": "tool_result", "tool_use_id": use["id"], "content": "A tree."} for use in used]
        text = {"type": "text", "text": f"{_WORDS[turn]} {'' if turn else self.name}"}
        self.messages.append({"role": "user", "content": [*results, text]})
        size: Fields = {"max_tokens": TURN_TOKENS} if turn else {"max_tokens": CALL_TOKENS, "temperature": 0}
        return {
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "messages": self.messages,
            "tools": [{**_LOOK, "input_schema": _SCHEMA}],
            "tool_choice": {"type": "none" if turn else "any"},
            **size,
        }

    def read(self, events: Sequence[Fields], seen: Seen) -> None:
        """The content blocks, put together as the SDK does it."""
        first, last = events[0].get("message", events[0]), events[-2] if events[1:] else events[0]
        blocks: list[Fields] = list(first["content"])
        for event in events[1:]:
            if event["type"] == "content_block_start":
                blocks.append({**event["content_block"], "json": ""})
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                name = {"text_delta": "text", "input_json_delta": "json"}[delta["type"]]
                blocks[-1][name] += delta.get("text", delta.get("partial_json"))
        for block in blocks:
            if arguments := block.pop("json", ""):
                block["input"] = json.loads(arguments)
        self.messages.append({"role": "assistant", "content": blocks})
        usage = {**first["usage"], **last["usage"]}
        seen.prompt_tokens = usage["input_tokens"] + (usage["cache_read_input_tokens"] or 0)
        seen.completion_tokens = usage["output_tokens"]
        assert len(self.seen) or any(block["type"] == "tool_use" for block in blocks), blocks


class Responses(Conversation):
    """OpenAI's responses, with a forced tool call; the client sends back all items."""

    path = RESPONSES

    def body(self, turn: int) -> Fields:
        calls = [item for item in self.messages if item.get("type") == "function_call"] if turn == 1 else []
        outputs = [
            {"type": "function_call_output", "call_id": c["call_id"], "output": "A tree."} for c in calls
        ]
        self.messages += [*outputs, user(f"{_WORDS[turn]} {'' if turn else self.name}")]
        size = {"max_output_tokens": TURN_TOKENS}
        call: Fields = {"tool_choice": "required", "max_output_tokens": CALL_TOKENS, "temperature": 0}
        tools = [{"type": "function", **_LOOK, "parameters": _SCHEMA}]
        return {"input": self.messages, "store": False, "tools": tools, **(size if turn else call)}

    def read(self, events: Sequence[Fields], seen: Seen) -> None:
        """The items of the whole response, which is in a stream's last event."""
        response = events[-1].get("response", events[-1])
        self.messages += response["output"]
        seen.prompt_tokens = response["usage"]["input_tokens"]
        seen.completion_tokens = response["usage"]["output_tokens"]
        kinds = [item["type"] for item in response["output"]]
        assert len(self.seen) or "function_call" in kinds, response


FORMATS: dict[str, type[Conversation]] = {
    "chat": Chat,
    "chat with reasoning": Reasoning,
    "token route": Tokens,
    "completions": Completions,
    "generate": Generate,
    "TRL": Trl,
    "messages": Messages,
    "responses": Responses,
}


def _take(seen: Seen, event: Fields) -> None:
    """The ids and counts of an answer or of an event of its stream."""
    usage = event.get("usage") or {}
    seen.prompt_tokens = usage.get("prompt_tokens", seen.prompt_tokens)
    seen.completion_tokens = usage.get("completion_tokens", seen.completion_tokens)
    seen.prompt_ids = event.get("prompt_token_ids") or seen.prompt_ids
    for choice in event["choices"]:
        seen.prompt_ids = choice.get("prompt_token_ids") or seen.prompt_ids
        seen.ids += choice.get("token_ids") or []
