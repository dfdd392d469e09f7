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

from collections.abc import Mapping

import msgspec

from proxy.dialects.responses.content import Item, content_of, joined_text, kind_of, text_field
from proxy.dialects.responses.ids import compaction_of, tokens_of, turn_of
from proxy.dialects.responses.tools import flat_name, wrapped_input
from proxy.errors import BadRequest

COMPACTIONS = ("compaction", "compaction_summary", "context_compaction")
"""Types of items that stand for a compacted conversation."""
TRIGGER = "compaction_trigger"
_ROLES = ("user", "system", "developer", "assistant")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")


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
            call, output = text_field(item, "call_id", at), content_of(item.get("output"), f"{at}.output")
            self.messages.append({"role": "tool", "tool_call_id": call, "content": output})
        elif kind in COMPACTIONS:
            self._add_summary(item, at)
        else:
            raise BadRequest(
                f"`{at}.type` is `{kind}`, which this server does not know: it takes messages, reasoning, "
                "function calls, custom tool calls and their outputs, and compactions",
                param=f"{at}.type",
            )

    def _add_message(self, item: Item, at: str) -> None:
        role = text_field(item, "role", at)
        if role not in _ROLES:
            raise BadRequest(f"`{at}.role` must be one of {', '.join(_ROLES)}", param=f"{at}.role")
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

    def _add_summary(self, item: Item, at: str) -> None:
        name = compaction_of(item.get("encrypted_content"))
        if name is None or name not in self._summaries:
            raise BadRequest(
                f"`{at}.encrypted_content` names no compacted conversation that this server keeps: it was "
                "made by another server, or is too old",
                param=f"{at}.encrypted_content",
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
        raise BadRequest("`input` must be a string or a list of items", param="input")
    for index, item in enumerate(value):
        item_kind(item, f"input[{index}]")
    return value


def encode(messages: list[Item]) -> msgspec.Raw:
    """Messages as JSON."""
    return msgspec.Raw(msgspec.json.encode(messages))
