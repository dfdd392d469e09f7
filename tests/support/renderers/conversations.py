"""The conversations that the layouts are compared with the engine's renderers on."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.support.renderers.layouts import LAYOUTS
from tests.support.renderers.pieces import Marker, Message, Pieces
from tests.support.templates.shapes import FURTHER_SHAPES, SHAPES, TOOLS

_LOST_BY_VLLM = ("call, null content",)
"""vLLM reads the calls of a message without content once, before some of its renderers do."""
_THINKING: tuple[dict[str, Any], ...] = (
    {},
    {"thinking": True},
    {"thinking": False},
    {"reasoning_effort": "low"},
    {"drop_thinking": False},
)
_RECORDED = (
    *("content", "content after system", "reasoning", "call", "content and call", "reasoning and call"),
    *("parallel calls, results swapped", "call, then result and user", "one result is missing"),
    *("system in the middle", "users in a row", "list content", "new system message"),
)
_PREAMBLES = {"deepseek": Marker("<\uff5cUser\uff5c>"), "harmony": Marker("<|start|>")}
"""What the first message of a user begins with, in layouts that abridge all before it."""


@dataclass(frozen=True)
class Cell:
    """One conversation to render."""

    name: str
    messages: list[Message]
    tools: list[Message]
    options: dict[str, Any]
    """Template arguments."""

    @property
    def body(self) -> dict[str, Any]:
        """The request for it."""
        tools = {"tools": self.tools} if self.tools else {}
        return {"messages": self.messages, **tools, **_asked(self.options)}

    @property
    def arguments(self) -> dict[str, Any]:
        """The template arguments that the chat route makes of the request."""
        effort = self.options.get("reasoning_effort")
        thinking = {} if effort is None else {"enable_thinking": effort != "none"}
        return {**thinking, **self.options}


def _asked(options: dict[str, Any]) -> dict[str, Any]:
    arguments = {name: value for name, value in options.items() if name != "reasoning_effort"}
    effort = {"reasoning_effort": options["reasoning_effort"]} if "reasoning_effort" in options else {}
    return {**effort, **({"chat_template_kwargs": arguments} if arguments else {})}


def cells(layout: str) -> Iterator[Cell]:
    """Every prefix of every shape from the sampled turn on, with the template arguments that matter."""
    variants = _THINKING if layout.startswith("deepseek") else ({},)
    for shape in (*SHAPES, *FURTHER_SHAPES):
        if shape.name in _LOST_BY_VLLM or (layout.startswith("mistral") and "developer" in shape.name):
            continue  # mistral-common knows developers from 1.13 on, with which vLLM 0.32 cannot parse calls
        for options in variants:
            for count in range(len(shape.new) + 1):
                messages = _renamed([*shape.history, *shape.new[:count]])
                name = f"{shape.name} + {count} {options or ''}".strip()
                yield Cell(name, messages, TOOLS if shape.with_tools else [], options)


def _renamed(messages: list[Message]) -> list[Message]:
    """With call ids as Mistral's tokenizers want them."""
    messages = copy.deepcopy(messages)
    for message in messages:
        for call in message.get("tool_calls") or ():
            call["id"] = call["id"].replace("call_", "call0000")
        if "tool_call_id" in message:
            message["tool_call_id"] = message["tool_call_id"].replace("call_", "call0000")
    return messages


def pieces_of(layout: str, cell: Cell) -> Pieces:
    """What a layout makes of a conversation, without an abridged preamble. Raises Unrenderable."""
    return after_preamble(layout, LAYOUTS[layout](cell.messages, cell.tools, cell.arguments))


def is_abridged(layout: str) -> bool:
    """Whether a layout has less text before the first message of a user than the engine."""
    return layout.split("_")[0] in _PREAMBLES


def after_preamble(layout: str, pieces: Pieces) -> Pieces:
    """A rendering from the first message of a user on, if its layout is abridged before it."""
    opens = _PREAMBLES.get(layout.split("_")[0])
    if opens is None:
        return pieces
    starts = (index for index, piece in enumerate(pieces) if piece == opens)
    return pieces[next(index for index in starts if layout != "harmony" or pieces[index + 1] == "user") :]


def recorded_cells(layout: str) -> Iterator[Cell]:
    """Those whose renderings by the engine are recorded."""
    for cell in cells(layout):
        shape, _, rest = cell.name.partition(" + ")
        if shape in _RECORDED and (rest != "0" or shape == "call") and not rest.startswith("0 {"):
            yield cell


_END = {
    "mistral": Marker("</s>"),
    "deepseek": Marker("<\uff5cend\u2581of\u2581sentence\uff5c>"),
    "inkling": Marker("<|content_model_end_sampling|>"),
}
"""What ends a turn, and no other message."""
_PROMPTS = {"harmony": 2, "kimi": 6}
"""The number of pieces of a generation prompt, where all messages end alike."""


def appended_pieces(
    layout: str, history: list[Message], new: list[Message], tools: list[Message], options: dict[str, Any]
) -> Pieces:
    """What a renderer puts after a turn that ended by itself, before the answer to new messages.

    Only the roles, the calls' ids and names and the number of messages of the history matter; its assistant
    messages may hold what no renderer takes, so they are replaced.
    """
    render = LAYOUTS[layout]
    plain = [_plain(message) if message["role"] == "assistant" else message for message in history]
    pieces = render([*plain, *new], tools, options)
    family = layout.split("_")[0]
    if (end := _END.get(family)) is None:
        return pieces[len(render(plain, tools, options)) - _PROMPTS[family] :]
    return pieces[len(pieces) - pieces[::-1].index(end) :]


def _plain(message: Message) -> Message:
    calls = [
        {**call, "function": {**call["function"], "arguments": "{}"}}
        for call in message.get("tool_calls") or ()
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls} if calls else {**_SAID}


_SAID = {"role": "assistant", "content": "Yes."}
