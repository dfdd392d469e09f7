"""The output items of a turn: reasoning, a message, tool calls, with the events that stream them.

An item is open while pieces of it arrive. One is open at a time: see `formats.blocks`.
"""

from typing import Any, NamedTuple

from tokenproxy.formats.blocks import Blocks, Call, Logprobs
from tokenproxy.formats.responses.items import Item, Names
from tokenproxy.formats.responses.request import Tools, unwrapped_input
from tokenproxy.record.turn import new_id
from tokenproxy.turn import wire

Event = dict[str, Any]


class _Open:
    """An item to which pieces are added."""

    def __init__(self, name: str, index: int) -> None:
        self.name = name
        self.index = index
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All pieces so far."""
        return "".join(self._pieces)

    def event(self, kind: str, **fields: Any) -> Event:
        """An event about this item."""
        return {"type": f"response.{kind}", "item_id": self.name, "output_index": self.index, **fields}


class _Kind(NamedTuple):
    """A kind of text, and the names of its events."""

    type: str
    """Of the part that holds it."""
    text: str
    """Begins the names of the events about the text."""
    part: str = "content_part"
    """Begins the names of the events about the part."""
    parts: str = "content"
    """The field of the item that holds the part."""
    field: str = "text"
    """The field of the part that holds the text."""


_MESSAGE = _Kind("output_text", "output_text")
_REFUSAL = _Kind("refusal", "refusal", field="refusal")
_REASONING = _Kind("reasoning_text", "reasoning_text")
_SUMMARY = _Kind("summary_text", "reasoning_summary_text", "reasoning_summary_part", "summary")


class _Text(_Open):
    """A message with one text or refusal, or reasoning in its content or its summary."""

    def __init__(self, name: str, index: int, kind: _Kind, encrypted: str | None) -> None:
        """`encrypted`: the encrypted content of reasoning; None if it has none."""
        super().__init__(name, index)
        self.kind = kind
        self._logprobs: list[Item] = []
        self._encrypted = encrypted
        self._position = {f"{kind.parts}_index": 0}

    def item(self, status: str) -> Item:
        """The item; without its text if its status is `in_progress`."""
        kind = self.kind
        parts = {kind.parts: [] if status == "in_progress" else [self._part(self.text)]}
        if kind in (_MESSAGE, _REFUSAL):
            return {"id": self.name, "type": "message", "status": status, "role": "assistant", **parts}
        reasoning = {"id": self.name, "type": "reasoning", "summary": [], **parts}
        return {**reasoning, "encrypted_content": self._encrypted, "status": status}

    def begin(self) -> list[Event]:
        """The events before the first piece."""
        return [self.event(f"{self.kind.part}.added", **self._position, part=self._part(""))]

    def add(self, piece: str, logprobs: list[Item]) -> list[Event]:
        """The events for the next piece."""
        self._pieces.append(piece)
        self._logprobs += logprobs
        more = {"logprobs": logprobs} if self.kind is _MESSAGE else {}
        return [self.event(f"{self.kind.text}.delta", **self._position, delta=piece, **more)]

    def end(self) -> list[Event]:
        """The events after the last piece."""
        text = {self.kind.field: self.text}
        if self.kind is _MESSAGE:
            text["logprobs"] = self._logprobs  # type: ignore[assignment]
        part = self._part(self.text)
        return [
            self.event(f"{self.kind.text}.done", **self._position, **text),
            self.event(f"{self.kind.part}.done", **self._position, part=part),
        ]

    def _part(self, text: str) -> Item:
        part: Item = {"type": self.kind.type, self.kind.field: text}
        return (
            {**part, "annotations": [], "logprobs": list(self._logprobs)} if self.kind is _MESSAGE else part
        )


class _Call(_Open):
    """A call of a function, or of a custom tool, whose input is known when the arguments are complete."""

    def __init__(self, name: str, index: int, call: str, function: str, tools: Tools) -> None:
        super().__init__(name, index)
        self._custom = function in tools.custom
        space, self._function = tools.spaces.get(function, (None, function))
        self._fields = {"call_id": call, "name": self._function}
        if space is not None:
            self._fields["namespace"] = space

    def item(self, status: str) -> Item:
        """The item; without its arguments if its status is `in_progress`."""
        text = "" if status == "in_progress" else self._text
        kind, field = ("custom_tool_call", "input") if self._custom else ("function_call", "arguments")
        return {"id": self.name, "type": kind, "status": status, field: text, **self._fields}

    def begin(self) -> list[Event]:
        """A call has no events before its first piece."""
        return []

    def add(self, piece: str, logprobs: Logprobs) -> list[Event]:
        """The events for the next piece of its arguments."""
        self._pieces.append(piece)
        return [] if self._custom else [self.event("function_call_arguments.delta", delta=piece)]

    def end(self) -> list[Event]:
        """The events after the last piece."""
        text = self._text
        if not self._custom:
            return [self.event("function_call_arguments.done", name=self._function, arguments=text)]
        return [
            self.event("custom_tool_call_input.delta", delta=text),
            self.event("custom_tool_call_input.done", input=text),
        ]

    @property
    def _text(self) -> str:
        return unwrapped_input(self.text) if self._custom else self.text


class Output(Blocks[Event]):
    """The output of one turn, from the pieces of its message."""

    empty = "content"

    def __init__(self, names: Names, tools: Tools, *, summary: bool, encrypted: bool) -> None:
        """An output without items.

        Args:
            names: of the items.
            summary: whether reasoning goes into the summary of its item, not into its content.
            encrypted: whether reasoning has encrypted content.
        """
        super().__init__()
        self.items: list[Item] = []
        """Those that are complete."""
        self._names = names
        self._tools = tools
        self._kinds = {
            "reasoning": _SUMMARY if summary else _REASONING, "content": _MESSAGE, "refusal": _REFUSAL
        }  # fmt: skip
        self._encrypted = encrypted
        self._item: _Text | _Call
        """Of the open block."""

    def add(self, message: dict[str, Any], thought: str, logprobs: list[Item]) -> list[Event]:
        """The events for the next piece of the message, or for a whole one.

        Args:
            thought: its reasoning.

        Raises:
            EngineBroken: it continues a tool call that has ended.
        """
        events: list[Event] = []
        if thought:
            self.add_text("reasoning", thought, events)
        if text := wire.text_of(message):
            self.add_text("content", text, events, logprobs)
        if refusal := wire.text_of(message, "refusal"):
            self.add_text("refusal", refusal, events)
        for call in wire.calls_of(message):
            self.add_call(call, events)
        return events

    def _start(self, block: str | Call, sent: list[Event]) -> None:
        index, names = len(self.items), self._names
        if isinstance(block, Call):
            kind = "custom_tool_call" if block.name in self._tools.custom else "function_call"
            identity = names.call(block.id, block.item) or new_id()
            self._item = _Call(names.item(kind, index), index, identity, block.name, self._tools)
        else:
            encrypted = names.encrypted(index) if self._encrypted and block == "reasoning" else None
            name = names.item("reasoning" if block == "reasoning" else "message", index)
            self._item = _Text(name, index, self._kinds[block], encrypted)
        added = {"type": "response.output_item.added", "output_index": index}
        sent += [{**added, "item": self._item.item("in_progress")}, *self._item.begin()]

    def _text(self, kind: str, text: str, logprobs: Logprobs, sent: list[Event]) -> None:
        sent += self._item.add(text, logprobs)

    def _arguments(self, call: Call, arguments: str, sent: list[Event]) -> None:
        sent += self._item.add(arguments, [])

    def _stop(self, block: str | Call, status: str, sent: list[Event]) -> None:
        item = self._item.item(status)
        self.items.append(item)
        done = {"type": "response.output_item.done", "output_index": self._item.index, "item": item}
        sent += [*self._item.end(), done]
