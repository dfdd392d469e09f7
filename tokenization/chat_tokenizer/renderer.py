"""Whoever renders conversations for an engine: a Jinja template here, or the engine itself.

What is appended to a turn is found by comparing renderings, with the same law for both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from chat_tokenizer.cache import BoundedCache
from chat_tokenizer.messages import Message, Tools
from chat_tokenizer.syntax import Syntax


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """The inputs of a rendering besides the messages."""

    tools: Tools | None = None
    add_generation_prompt: bool = True
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    stopped: Callable[[], bool] = field(default=bool, repr=False, compare=False)
    """Returns whether the caller no longer waits for the rendering."""

    def key(self) -> object:
        """A value for cache keys."""
        return [list(self.tools) if self.tools else None, dict(self.kwargs), self.add_generation_prompt]


@dataclass(frozen=True, slots=True)
class Append:
    """New messages after a sampled turn, and how they are rendered."""

    context: Sequence[Message]
    """The messages up to and including the turn: the history, or a smaller context that stands for it."""
    new: Sequence[Message]
    """The messages after it."""
    options: RenderOptions

    @property
    def turn(self) -> Message:
        """The sampled turn."""
        return self.context[-1]

    def after(self, context: Sequence[Message]) -> "Append":
        """The same messages after another context."""
        return Append(context, self.new, self.options)


class Renderer(Protocol):
    """Renders conversations as an engine does. Safe to use from several threads."""

    @property
    def identity(self) -> bytes:
        """All that its renderings depend on, besides the vocabulary: equal bytes render alike."""
        ...

    @property
    def remembered(self) -> BoundedCache[bytes, str] | None:
        """Renderings of short conversations, for `chat_tokenizer.turns`; None if they may print a time in a
        form that is not known."""
        ...

    @property
    def syntax(self) -> Syntax:
        """The constants and variables on which a rendering may depend."""
        ...

    @property
    def content_format(self) -> str | None:
        """How it passes text parts to a template: "string", joined; "openai", as parts; None if not known."""
        ...

    @property
    def own_arguments(self) -> frozenset[str]:
        """Names in `RenderOptions.kwargs` that are the renderer's own arguments, not variables."""
        ...

    def text(self, messages: Sequence[Message], options: RenderOptions) -> str:
        """Render messages in the form that OpenAI clients send.

        Raises:
            InvalidMessages: a message is malformed, or the renderer refuses it.
            TemplateUnsupported: the tokenizer does not give the engine's ids for the text.
            Stopped: the caller no longer waits.
        """
        ...

    def refuse_merged(
        self, new: Sequence[Message], history: Sequence[Message] | None, options: RenderOptions
    ) -> None:
        """Refuse new messages that are merged into the first message of the conversation.

        Raises:
            TemplateUnsupported: a new message changes the start of the rendering.
            InvalidMessages: there is nothing to render the messages with.
        """
        ...

    def takes_later_system(self) -> bool:
        """Whether conversations may have a system message after the first message."""
        ...

    def now(self) -> list[str]:
        """The time in the forms that a rendering prints: equal times give equal renderings."""
        ...
