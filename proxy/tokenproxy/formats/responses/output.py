"""The output items of a turn: reasoning, a message, tool calls, with the events that stream them.

An item is open while pieces of it arrive. One is open at a time: the first piece of the next one closes it.
"""

from typing import Any, NamedTuple

from tokenproxy.base.errors import EngineBroken
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

    def add(self, piece: str) -> list[Event]:
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


class Output:
    """The output of one turn, from the pieces of its message."""

    def __init__(self, names: Names, tools: Tools, *, summary: bool, encrypted: bool) -> None:
        """An output without items.

        Args:
            names: of the items.
            summary: whether reasoning goes into the summary of its item, not into its content.
            encrypted: whether reasoning has encrypted content.
        """
        self.items: list[Item] = []
        """Those that are complete."""
        self._names = names
        self._tools = tools
        self._reasoning = _SUMMARY if summary else _REASONING
        self._encrypted = encrypted
        self._open: _Text | _Call | None = None
        self._call_index: int | None = None
        """Of the open call, as the engine counts."""
        self._closed_calls: set[int] = set()
        self._unnamed: dict[int, str] = {}
        """Ids of calls whose names did not arrive yet."""

    def add(self, message: dict[str, Any], thought: str, logprobs: list[Item]) -> list[Event]:
        """The events for the next piece of the message, or for a whole one.

        Args:
            thought: its reasoning.

        Raises:
            EngineBroken: it continues a tool call that was followed by another one.
        """
        events: list[Event] = []
        if thought:
            events += self._add_text(self._reasoning, thought, [])
        if text := wire.text_of(message):
            events += self._add_text(_MESSAGE, text, logprobs)
        if refusal := wire.text_of(message, "refusal"):
            events += self._add_text(_REFUSAL, refusal, [])
        for call in wire.calls_of(message):
            events += self._add_call(call)
        return events

    def end(self, status: str) -> list[Event]:
        """The events after the last piece. An output without items gets an empty message.

        So a client that sends the output back sends a turn.

        Args:
            status: of the item that is open.
        """
        empty = not self.items and self._open is None
        begun = self._begin(self._new_text(_MESSAGE)) if empty else []
        return begun + self._close(status)

    def _add_text(self, kind: _Kind, text: str, logprobs: list[Item]) -> list[Event]:
        events: list[Event] = []
        opened = self._open
        if not isinstance(opened, _Text) or opened.kind is not kind:
            events = self._close("completed")
            opened = self._new_text(kind)
            events += self._begin(opened)
        return events + opened.add(text, logprobs)

    def _new_text(self, kind: _Kind) -> _Text:
        index = len(self.items)
        if kind in (_MESSAGE, _REFUSAL):
            return _Text(self._names.item("message", index), index, kind, None)
        encrypted = self._names.encrypted(index) if self._encrypted else None
        return _Text(self._names.item("reasoning", index), index, kind, encrypted)

    def _add_call(self, call: wire.CallPiece) -> list[Event]:
        """The events for a piece of a call, or for a whole call."""
        events: list[Event] = []
        opened = self._open
        if call.position != self._call_index or not isinstance(opened, _Call):
            if call.position in self._closed_calls:
                raise EngineBroken("the engine continued a tool call after it began another one")
            own = self._names.call(call.id, call.position) if call.id else None
            identity = own or self._unnamed.pop(call.position, None) or new_id()
            if not call.name:
                self._unnamed[call.position] = identity
                return []
            events = self._close("completed")
            index, tools = len(self.items), self._tools
            kind = "custom_tool_call" if call.name in tools.custom else "function_call"
            name = self._names.item(kind, index)
            opened = _Call(name, index, identity, call.name, tools)
            events += self._begin(opened)
            self._call_index = call.position
        return events + opened.add(call.arguments) if call.arguments else events

    def _begin(self, opened: _Text | _Call) -> list[Event]:
        self._open = opened
        added = {"type": "response.output_item.added", "output_index": opened.index}
        return [{**added, "item": opened.item("in_progress")}, *opened.begin()]

    def _close(self, status: str) -> list[Event]:
        opened, self._open = self._open, None
        if opened is None:
            return []
        if self._call_index is not None:
            self._closed_calls.add(self._call_index)
            self._call_index = None
        item = opened.item(status)
        self.items.append(item)
        done = {"type": "response.output_item.done", "output_index": opened.index, "item": item}
        return [*opened.end(), done]
