"""The ways to append that `append.py` measures."""

from dataclasses import dataclass
from itertools import product
from typing import Literal

from benchmarks.author import TOOLS, Messages
from tokenization import Appended, ChatTokenizer, Continuation


@dataclass(frozen=True, slots=True)
class Past:
    """A conversation to append to."""

    tokenizer: ChatTokenizer
    messages: Messages
    ids: list[int]

    def render(self, new: Messages) -> list[int]:
        """The next prompt, rendered from all messages."""
        return self.tokenizer.render([*self.messages, *new], tools=TOOLS)

    def text(self, new: Messages) -> str:
        """The text of the next prompt, rendered from all messages."""
        return self.tokenizer.text([*self.messages, *new], tools=TOOLS)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to append."""

    function: Literal["prompt_ids", "append", "continuation"]
    """What is called; `prompt_ids` is `append`, and a read of the list of all ids."""
    new: bool
    """Whether each call gets a new result; otherwise a cached one."""
    history: bool
    """Whether it gets the messages that led to the ids."""
    local: bool = True
    """Whether the template is local."""

    @property
    def name(self) -> str:
        """The row's name in the tables."""
        name = f"{self.function}, {'new' if self.new else 'repeated'}{', history=' if self.history else ''}"
        return name if self.local else f"{name}, not local"

    @property
    def grows(self) -> bool:
        """Whether it copies the ids or reads the messages, so that it takes longer after a longer history."""
        return self.function == "prompt_ids" or not self.local

    def call(self, past: Past, new: Messages) -> Appended | Continuation:
        """Append `new`."""
        history = past.messages if self.history else None
        if self.function == "continuation":
            return past.tokenizer.continuation(past.ids[-1], new, history=history, tools=TOOLS)
        appended = past.tokenizer.append(past.ids, new, history=history, tools=TOOLS)
        if self.function == "prompt_ids":
            _ = appended.prompt_ids
        return appended


NOT_LOCAL = tuple(Way("append", new, history=True, local=False) for new in (True, False))
WAYS = (
    *(
        Way(function, new, history)
        for function in ("prompt_ids", "append", "continuation")
        for new, history in product((True, False), repeat=2)
    ),
    *NOT_LOCAL,
)
NEW, NEW_WITH_HISTORY = (Way("append", new=True, history=history) for history in (False, True))
"""Also measured with the event loop, as is the first of `NOT_LOCAL`; the first one also on new threads."""
