"""The output items of a turn: reasoning, a message, tool calls, with the events that stream them.

An item is open while pieces of it arrive. One is open at a time: the first piece of the next one closes it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from proxy.dialects.chat_parts import CallPart, MessagePart
from proxy.dialects.responses import ids
from proxy.dialects.responses.items import Item
from proxy.dialects.responses.request import Tools, unwrapped_input
from proxy.errors import EngineBroken

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What a client requested of the output."""

    tools: Tools
    summary: bool
    """Whether reasoning goes into the summary of its item, not into its content."""
    encrypted: bool
    """Whether reasoning has encrypted content."""


class _Open(ABC):
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

    @abstractmethod
    def item(self, status: str) -> Item:
        """The item; without its pieces if its status is `in_progress`."""

    def begin(self) -> list[Event]:
        """The events before the first piece."""
        return []

    @abstractmethod
    def add(self, piece: str) -> Event:
        """The event for the next piece."""

    @abstractmethod
    def end(self) -> list[Event]:
        """The events after the last piece."""


class _Reasoning(_Open):
    """Reasoning, in the item's content or in its summary."""

    def __init__(self, name: str, index: int, encrypted: str | None, *, summary: bool) -> None:
        super().__init__(name, index)
        self._encrypted = encrypted
        kind = "summary" if summary else "content"
        self._position: Item = {f"{kind}_index": 0}
        self._kind, self._type = kind, "summary_text" if summary else "reasoning_text"
        self._part = "reasoning_summary_part" if summary else "content_part"
        self._text = "reasoning_summary_text" if summary else "reasoning_text"

    def item(self, status: str) -> Item:
        parts = [] if status == "in_progress" else [{"type": self._type, "text": self.text}]
        item: Item = {"id": self.name, "type": "reasoning", "summary": []}
        if self._kind == "content":
            item["content"] = parts
        else:
            item["summary"] = parts
        return {**item, "encrypted_content": self._encrypted, "status": status}

    def begin(self) -> list[Event]:
        return [self.event(f"{self._part}.added", **self._position, part={"type": self._type, "text": ""})]

    def add(self, piece: str) -> Event:
        self._pieces.append(piece)
        return self.event(f"{self._text}.delta", **self._position, delta=piece)

    def end(self) -> list[Event]:
        text = self.text
        part = {"type": self._type, "text": text}
        return [
            self.event(f"{self._text}.done", **self._position, text=text),
            self.event(f"{self._part}.done", **self._position, part=part),
        ]


class _Text(_Open):
    """A message with one text."""

    def __init__(self, name: str, index: int) -> None:
        super().__init__(name, index)
        self.logprobs: list[Item] = []

    def item(self, status: str) -> Item:
        content = [] if status == "in_progress" else [self._part_with(self.text)]
        return {
            "id": self.name, "type": "message", "status": status, "role": "assistant", "content": content
        }  # fmt: skip

    def begin(self) -> list[Event]:
        return [self.event("content_part.added", content_index=0, part=self._part_with(""))]

    def add(self, piece: str) -> Event:
        return self.add_with(piece, [])

    def add_with(self, piece: str, logprobs: list[Item]) -> Event:
        """The event for the next piece and its log-probabilities."""
        self._pieces.append(piece)
        self.logprobs += logprobs
        return self.event("output_text.delta", content_index=0, delta=piece, logprobs=logprobs)

    def end(self) -> list[Event]:
        text = self.text
        return [
            self.event("output_text.done", content_index=0, text=text, logprobs=self.logprobs),
            self.event("content_part.done", content_index=0, part=self._part_with(text)),
        ]

    def _part_with(self, text: str) -> Item:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self.logprobs)}


class _Refusal(_Open):
    """A message that refuses."""

    def item(self, status: str) -> Item:
        content = [] if status == "in_progress" else [{"type": "refusal", "refusal": self.text}]
        return {
            "id": self.name, "type": "message", "status": status, "role": "assistant", "content": content
        }  # fmt: skip

    def begin(self) -> list[Event]:
        return [self.event("content_part.added", content_index=0, part={"type": "refusal", "refusal": ""})]

    def add(self, piece: str) -> Event:
        self._pieces.append(piece)
        return self.event("refusal.delta", content_index=0, delta=piece)

    def end(self) -> list[Event]:
        part = {"type": "refusal", "refusal": self.text}
        return [
            self.event("refusal.done", content_index=0, refusal=self.text),
            self.event("content_part.done", content_index=0, part=part),
        ]


class _Call(_Open):
    """A call of a function."""

    def __init__(self, name: str, index: int, call: str, function: str, tools: Tools) -> None:
        super().__init__(name, index)
        self._call = call
        space, self._function = tools.spaces.get(function, (None, function))
        self._space = {} if space is None else {"namespace": space}

    def item(self, status: str) -> Item:
        arguments = "" if status == "in_progress" else self.text
        return {
            "id": self.name, "type": "function_call", "status": status, "call_id": self._call,
            "name": self._function, "arguments": arguments, **self._space,
        }  # fmt: skip

    def add(self, piece: str) -> Event:
        self._pieces.append(piece)
        return self.event("function_call_arguments.delta", delta=piece)

    def end(self) -> list[Event]:
        return [self.event("function_call_arguments.done", name=self._function, arguments=self.text)]


class _CustomCall(_Open):
    """A call of a custom tool. Its input is known when the arguments that hold it are complete."""

    def __init__(self, name: str, index: int, call: str, tool: str) -> None:
        super().__init__(name, index)
        self._call = call
        self._tool = tool

    def item(self, status: str) -> Item:
        value = "" if status == "in_progress" else unwrapped_input(self.text)
        return {
            "id": self.name, "type": "custom_tool_call", "status": status, "call_id": self._call,
            "name": self._tool, "input": value,
        }  # fmt: skip

    def add(self, piece: str) -> Event:
        self._pieces.append(piece)
        return {}

    def end(self) -> list[Event]:
        value = unwrapped_input(self.text)
        return [
            self.event("custom_tool_call_input.delta", delta=value),
            self.event("custom_tool_call_input.done", input=value),
        ]


class Output:
    """The output of one turn, from the pieces of its message."""

    def __init__(self, options: OutputOptions, names: ids.Names) -> None:
        """`names`: of the items."""
        self.items: list[Item] = []
        """Those that are complete."""
        self._options = options
        self._names = names
        self._open: _Open | None = None
        self._call_index: int | None = None
        """Of the open call, as the engine counts."""
        self._closed_calls: set[int] = set()
        self._unnamed: dict[int, str] = {}
        """Ids of calls whose names did not arrive yet."""

    def add(self, part: MessagePart, logprobs: list[Item]) -> list[Event]:
        """The events for the next piece of the message, or for a whole one.

        Raises:
            EngineBroken: it continues a tool call that was followed by another one.
        """
        events: list[Event] = []
        if part.thought:
            events += self._switch(_Reasoning)
            events.append(self._opened.add(part.thought))
        if part.content:
            events += self._switch(_Text)
            assert isinstance(self._opened, _Text)
            events.append(self._opened.add_with(part.content, logprobs))
        if part.refusal:
            events += self._switch(_Refusal)
            events.append(self._opened.add(part.refusal))
        for call in part.tool_calls or []:
            events += self._add_call(call)
        return [event for event in events if event]

    def end(self, status: str) -> list[Event]:
        """The events after the last piece. An output without items gets an empty message.

        So a client that sends the output back sends a turn.

        Args:
            status: of the item that is open.
        """
        events: list[Event] = []
        if not self.items and self._open is None:
            events = self._switch(_Text)
        return events + self._close(status)

    @property
    def _opened(self) -> _Open:
        assert self._open is not None
        return self._open

    def _switch(self, kind: type[_Reasoning] | type[_Text] | type[_Refusal]) -> list[Event]:
        """Open an item unless one of its kind is open."""
        if isinstance(self._open, kind):
            return []
        events, index = self._close("completed"), len(self.items)
        if kind is _Reasoning:
            encrypted = self._names.encrypted(index) if self._options.encrypted else None
            name = self._names.item("reasoning", index)
            return events + self._begin(_Reasoning(name, index, encrypted, summary=self._options.summary))
        name = self._names.item("message", index)
        return events + self._begin(_Text(name, index) if kind is _Text else _Refusal(name, index))

    def _add_call(self, call: CallPart) -> list[Event]:
        """The events for a piece of a call, or for a whole call."""
        function, events = call.function, []
        if call.index != self._call_index or not isinstance(self._open, _Call | _CustomCall):
            if call.index in self._closed_calls:
                raise EngineBroken("the engine continued a tool call after it began another one")
            own = self._names.call(call.id, call.index) if call.id else None
            name = own or self._unnamed.pop(call.index, None) or ids.base_of("")
            if function is None or not function.name:
                self._unnamed[call.index] = name
                return []
            events = self._close("completed")
            events += self._begin(self._new_call(name, function.name))
            self._call_index = call.index
        if function is not None and function.arguments:
            events.append(self._opened.add(function.arguments))
        return events

    def _new_call(self, call: str, function: str) -> _Open:
        index, tools = len(self.items), self._options.tools
        if function in tools.custom:
            return _CustomCall(self._names.item("custom_tool_call", index), index, call, function)
        return _Call(self._names.item("function_call", index), index, call, function, tools)

    def _begin(self, opened: _Open) -> list[Event]:
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
