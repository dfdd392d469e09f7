"""Input items as chat messages.

The items of one turn of the model (reasoning, a message, tool calls) are one assistant message of a chat, so
that it equals the recorded one. Items are of one turn if their ids name the same turn. Some clients drop the
ids; then an item belongs to the assistant message before it

- if that message has tool calls, whose results are still to come;
- if it is a tool call;
- if it is a text and the message has none.

So a text after a text, or reasoning after a text, begins the next turn. Results of parallel calls may stand
between the calls of one turn.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from tokenproxy.base.errors import BadRequest
from tokenproxy.record.echo import TurnTokens, turn_in

Item = dict[str, Any]
_MARK = "context_compaction"
"""The type of an item that, without content, only marks where a conversation was compacted."""
COMPACTIONS = ("compaction", "compaction_summary", _MARK)
"""Types of items that stand for a compacted conversation."""
TRIGGER = "compaction_trigger"
CUSTOM_INPUT = "input"
"""The one parameter of a custom tool. Names and texts are vLLM's."""
TOOLS, SETTINGS = "additional_tools", "configuration_update"
"""Types of items with which Codex adds tools, and changes the effort, for the turns after them."""
_CALLS = {
    "tool_search_call": ("tool_search", "arguments"),
    "local_shell_call": ("local_shell", "action"),
    "web_search_call": ("web_search", "action"),
    "image_generation_call": ("image_generation", "arguments"),
}
"""The function whose call an item stands for, and the field of its arguments."""
_CIPHERTEXT = re.compile(r"gAAAA[A-Za-z0-9_-]+=*")
"""What OpenAI's models write in place of a text that only they can read. Codex also marks as encrypted what
other models wrote as it is."""
_ENCRYPTED = "[part of the message is encrypted]"
_ROLES = ("user", "system", "developer", "assistant")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "compaction": "cmp",
}
_ITEM = re.compile(r"(?:msg|rs|fc|ctc|cmp)_([A-Za-z0-9_-]{36,40})")
_PLAIN = re.compile(r"([0-9a-f]{32})[0-9a-f]{4}")
_RESPONSE = "resp_"
_RESPONSE_ID = re.compile(rf"{_RESPONSE}[0-9a-f]{{32}}")


def item_kind(item: object, at: str) -> str:
    """The type of an item; a message or a reference may lack it. Raises BadRequest."""
    if isinstance(item, dict) and item.get("type") is None:
        if "role" in item:
            return "message"
        if "id" in item:
            return "item_reference"
    return kind_of(item, at)


def messages_of(
    earlier: list[Item], items: list[Item], summaries: Mapping[str, str]
) -> tuple[list[Item], dict[int, list[str]]]:
    """The chat messages of items, and by index the tokens with which assistant messages name their turns.

    Args:
        earlier: items of previous responses.
        items: those of the request after them; references to items are resolved.
        summaries: the texts for compacted conversations, by the ids of their items.

    Raises:
        BadRequest: an item cannot be read, or has a type that this server does not know; `param` names it.
    """
    building = _Messages(summaries)
    for index, item in enumerate(earlier):
        building.add(item, f"previous_response_id.items[{index}]")
    for index, item in enumerate(items):
        building.add(item, f"input[{index}]")
    return building.messages, building.tokens


class _Messages:
    """The messages so far."""

    def __init__(self, summaries: Mapping[str, str]) -> None:
        self.messages: list[Item] = []
        self._summaries = summaries
        self._turns: dict[int, str] = {}
        """The turns that assistant messages name, by index."""
        self.tokens: dict[int, list[str]] = {}
        """What these messages name their turns with."""

    def add(self, item: Item, at: str) -> None:
        """Add an item. Raises BadRequest."""
        kind = item_kind(item, at)
        if kind == "message":
            self._add_message(item, at)
        elif kind == "reasoning":
            self._add_reasoning(item, at)
        elif kind == "function_call":
            arguments = text_field(item, "arguments", at)
            self._add_call(item, arguments, at)
        elif kind == "custom_tool_call":
            self._add_call(item, wrapped_input(text_field(item, "input", at)), at)
        elif kind in _OUTPUTS:
            self._add_output(item, at)
        elif kind in _CALLS:
            name, field = _CALLS[kind]
            asked = item.get(field) or {}
            # what a provider ran has no id
            call = {**item, "name": name, "call_id": item.get("call_id") or name}
            self._add_call(call, asked if isinstance(asked, str) else _json(asked), at)
        elif kind == "tool_search_output":
            call_id = item.get("call_id") or _CALLS["tool_search_call"][0]
            content = _json(item.get("tools") or [])
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        elif kind == "agent_message":
            self._add_agent_message(item, at)
        elif kind in COMPACTIONS and (kind != _MARK or item.get("encrypted_content") is not None):
            self._add_summary(item, at)
        elif kind not in (TOOLS, SETTINGS, _MARK):
            raise BadRequest.of(
                f"{at}.type",
                f"is `{kind}`, which this server does not know: it takes messages, reasoning, "
                "calls of functions, custom tools, shells and searches, their outputs, messages of agents, "
                "and compactions",
            )

    def _add_message(self, item: Item, at: str) -> None:
        role = text_field(item, "role", at)
        if role not in _ROLES:
            raise BadRequest.of(f"{at}.role", f"must be one of {', '.join(_ROLES)}")
        if role != "assistant":
            self.messages.append({"role": role, "content": content_of(item.get("content"), f"{at}.content")})
            return
        content = item.get("content")
        parts = content if isinstance(content, list) else []
        refusals = [part for part in parts if isinstance(part, dict) and part.get("type") == "refusal"]
        texts = [part for part in parts if part not in refusals] if parts else content
        message = self._assistant(item, "content")
        if texts or not refusals:
            message["content"] = (message.get("content") or "") + joined_text(texts, f"{at}.content")
        for part in refusals:
            message["refusal"] = (message.get("refusal") or "") + text_field(part, "refusal", f"{at}.content")

    def _add_reasoning(self, item: Item, at: str) -> None:
        name = "content" if item.get("content") else "summary"
        text = joined_text(item.get(name) or [], f"{at}.{name}")
        if text or _turn(item):
            message = self._assistant(item, "reasoning")
            message["reasoning"] = (message.get("reasoning") or "") + text

    def _add_call(self, item: Item, arguments: str, at: str) -> None:
        name = text_field(item, "name", at)
        if item.get("namespace") is not None:
            name = flat_name(text_field(item, "namespace", at), name)
        function = {"name": name, "arguments": arguments}
        call = {"id": text_field(item, "call_id", at), "type": "function", "function": function}
        self._assistant(item, "tool_calls").setdefault("tool_calls", []).append(call)

    def _add_output(self, item: Item, at: str) -> None:
        """Add a result of a call. The output of a function that no call asked for becomes a user message."""
        content = content_of(item.get("output"), f"{at}.output")
        if item.get("call_id") is None and isinstance(item.get("name"), str):
            self.messages.append({"role": "user", "content": content})
            return
        call = text_field(item, "call_id", at)
        self.messages.append({"role": "tool", "tool_call_id": call, "content": content})

    def _add_agent_message(self, item: Item, at: str) -> None:
        """Add what another agent of the client's wrote, as a message of the user that names both agents."""
        text = joined_text(item.get("content"), f"{at}.content")
        author, recipient = (item.get(name) or "agent" for name in ("author", "recipient"))
        self.messages.append({"role": "user", "content": f"Message from {author} to {recipient}:\n{text}"})

    def _add_summary(self, item: Item, at: str) -> None:
        name = compaction_of(item.get("encrypted_content"))
        if name is None or name not in self._summaries:
            raise BadRequest.of(
                f"{at}.encrypted_content",
                "names no compacted conversation that this server keeps: it was "
                "made by another server, or is too old",
            )
        self.messages.append({"role": "user", "content": self._summaries[name]})

    def _assistant(self, item: Item, field: str) -> Item:
        """The assistant message to which an item belongs; a new one if there is none.

        Args:
            field: of the message, which the item sets.
        """
        turn = _turn(item)
        index = self._of_turn(turn, field)
        if index is None:
            index = len(self.messages)
            self.messages.append({"role": "assistant"})
        if turn is not None:
            self._turns[index] = turn
            self.tokens.setdefault(index, []).extend(tokens_of(item.get("id"), item.get("encrypted_content")))
        return self.messages[index]

    def _of_turn(self, turn: str | None, field: str) -> int | None:
        index = len(self.messages) - 1
        while turn is not None and index >= 0 and self.messages[index]["role"] == "tool":
            index -= 1
        if index < 0 or self.messages[index]["role"] != "assistant":
            return None
        recorded = self._turns.get(index)
        if turn is not None and recorded is not None:
            return index if turn == recorded else None
        if index < len(self.messages) - 1:
            return None  # results follow, and nothing tells that the item belongs before them
        message = self.messages[index]
        if field == "tool_calls" or "tool_calls" in message:
            return index
        free = "content" not in message and (field == "content" or "reasoning" not in message)
        return index if free else None


def _turn(item: Item) -> str | None:
    return turn_of(item.get("id"), item.get("encrypted_content"))


def as_input(value: object) -> list[Item]:
    """The items of `input`: a text is a message of the user.

    Raises:
        BadRequest: it is neither a text nor a list of objects.
    """
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise BadRequest.of("input", "must be a string or a list of items")
    for index, item in enumerate(value):
        item_kind(item, f"input[{index}]")
    return value


# --- parts


def flat_name(namespace: str, name: str) -> str:
    """The name that the model sees of a function in a namespace."""
    return f"{namespace}__{name}"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def wrapped_input(text: str) -> str:
    """The arguments of the function call that stands for a call of a custom tool."""
    return json.dumps({CUSTOM_INPUT: text}, ensure_ascii=False)


def text_field(item: Item, name: str, at: str) -> str:
    """A field that must be a string. Raises BadRequest."""
    value = item.get(name)
    if not isinstance(value, str):
        raise BadRequest.of(f"{at}.{name}", "must be a string")
    return value


def content_of(content: object, at: str) -> str | list[Item]:
    """What a user, the system or a tool says, as the content of a chat message.

    Args:
        at: path of the content in the request, for error messages.

    Raises:
        BadRequest: it is neither a string nor a list of texts, images and sounds.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest.of(at, "must be a string or a list of parts")
    return [_part(part, f"{at}[{index}]") for index, part in enumerate(content)]


def joined_text(parts: object, at: str) -> str:
    """The texts of a list of parts, joined as the SDKs join them.

    Raises:
        BadRequest: it is not a list of texts.
    """
    content = content_of(parts, at)
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part["type"] != "text":
            where = f"{at}[{index}].type"
            raise BadRequest.of(where, "must be that of a text: only texts are possible here")
    return "".join(part["text"] for part in content)


def kind_of(part: object, at: str) -> str:
    """The type of a part. Raises BadRequest."""
    if not isinstance(part, dict):
        raise BadRequest.of(at, "must be an object")
    return text_field(part, "type", at)


def _part(part: object, at: str) -> Item:
    kind = kind_of(part, at)
    assert isinstance(part, dict)
    if kind in _TEXTS:
        return {"type": "text", "text": text_field(part, "text", at)}
    if kind == "input_image":
        return _image(part, at)
    if kind == "encrypted_content":
        text = text_field(part, kind, at)
        return {"type": "text", "text": _ENCRYPTED if _CIPHERTEXT.fullmatch(text) else text}
    if kind == "input_audio" and isinstance(part.get("audio_url"), str):
        return {"type": "audio_url", "audio_url": {"url": part["audio_url"]}}
    if kind == "input_audio" and isinstance(part.get("input_audio"), dict):
        return {"type": "input_audio", "input_audio": part["input_audio"]}
    raise BadRequest.of(
        f"{at}.type", f"is `{kind}`: this server takes `input_text`, `input_image` and `input_audio`"
    )


def _image(part: Item, at: str) -> Item:
    if part.get("image_url") is None:
        raise BadRequest(
            f"`{at}` names a file: this server keeps none, send `image_url` (a data URL or a web address)",
            param=f"{at}.image_url",
        )
    url: Item = {"url": text_field(part, "image_url", at)}
    if part.get("detail") is not None:
        url["detail"] = text_field(part, "detail", at)
    return {"type": "image_url", "image_url": url}


# --- ids of responses and of their items, and the encrypted content of items: names that clients send back,
# all made of the turn's id. None holds text of the model.


def response_id(base: str) -> str:
    """The id of a response."""
    return f"{_RESPONSE}{base}"


def is_response_id(name: str) -> bool:
    """Whether a name that a client sent may be that of a stored response, not of another document."""
    return _RESPONSE_ID.fullmatch(name) is not None


class Names:
    """Names the items of one response: by tokens that name the turn, where it is recorded."""

    def __init__(self, base: str, tokens: TurnTokens | None = None) -> None:
        """`base`: the turn's id, or a new one if it is not recorded."""
        self._base = base
        self._tokens = tokens

    def item(self, kind: str, index: int) -> str:
        """The id of an output item.

        Args:
            kind: its `type`.
            index: its position in the output.
        """
        return f"{_PREFIXES[kind]}_{self.encrypted(index)}"

    def encrypted(self, index: int) -> str:
        """The encrypted content of an output item."""
        return self._tokens.token(index) if self._tokens else f"{self._base}{index:04x}"

    def call(self, own: str, index: int) -> str:
        """The id of a tool call, of which the engine has its own; see `TurnTokens.call_id`."""
        return self._tokens.call_id(own, index) if self._tokens else own


def input_item_id(response: str, index: int) -> str:
    """The id of an input item that its client gave none, in a compacted conversation."""
    return f"in_{response.removeprefix(_RESPONSE)}_{index}"


def turn_of(name: object, encrypted: object = None) -> str | None:
    """The turn that an item's id names, or its encrypted content; None if neither was made here.

    It is not verified that it is a turn of this client.
    """
    for token in tokens_of(name, encrypted):
        plain = _PLAIN.fullmatch(token)
        return plain[1] if plain else turn_in(token)
    return None


def tokens_of(name: object, encrypted: object = None) -> list[str]:
    """What the id of an item and its encrypted content hold, if they may have been made here."""
    item = _ITEM.fullmatch(name) if isinstance(name, str) else None
    found = [item[1]] if item else []
    if isinstance(encrypted, str):
        found.append(encrypted)
    return [token for token in found if _PLAIN.fullmatch(token) or turn_in(token)]


def compaction_of(encrypted: object) -> str | None:
    """The id of the compaction item that has this encrypted content; None if it was not made here."""
    return f"{_PREFIXES['compaction']}_{encrypted}" if tokens_of(None, encrypted) else None
