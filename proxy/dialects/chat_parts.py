"""The parts of a chat completion, and of its chunks, from which other wire formats are written."""

from typing import Any

import msgspec


class FunctionPart(msgspec.Struct):
    """The function of a tool call, or the next piece of it."""

    name: str | None = None
    arguments: str | None = None


class CallPart(msgspec.Struct):
    """A tool call, or the next piece of it: pieces of one call have one index."""

    index: int = 0
    id: str | None = None
    function: FunctionPart | None = None


class MessagePart(msgspec.Struct):
    """The message of a choice, or the next piece of it."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallPart] | None = None
    refusal: str | None = None

    @property
    def thought(self) -> str:
        """The reasoning under either of its names."""
        return self.reasoning or self.reasoning_content or ""


class PromptDetails(msgspec.Struct):
    """See `UsagePart`."""

    cached_tokens: int | None = None


class CompletionDetails(msgspec.Struct):
    """See `UsagePart`."""

    reasoning_tokens: int | None = None


class UsagePart(msgspec.Struct):
    """Number of ids so far."""

    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Ids of the prompt that the engine had in its cache; None if it does not report that."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class ChoicePart(msgspec.Struct):
    """A choice of a whole completion (`message`) or of a chunk (`delta`)."""

    index: int = 0
    message: MessagePart | None = None
    delta: MessagePart | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: dict[str, Any] | None = None


class ErrorPart(msgspec.Struct):
    """An error that ends a stream."""

    message: str = ""
    code: int | str | None = None


class Chat(msgspec.Struct):
    """A chat completion, or one of its chunks."""

    id: str = ""
    created: int = 0
    model: str = ""
    choices: list[ChoicePart] = []
    usage: UsagePart | None = None
    error: ErrorPart | None = None
    """The engine's, in place of a chunk: nothing follows."""


decode_chat = msgspec.json.Decoder(Chat).decode
"""Raises `msgspec.MsgspecError` for what is no chat completion."""
