"""What a chat template prints after an assistant turn, read from its own renderings.

A turn is rendered with a marker as the last text that the model wrote. After the marker the rendering holds,
in this order: the rest of the turn's own syntax (the closing brackets of a tool call), the text that closes
the turn, and the continuation (separators, new messages, generation prompt). The model samples all of the
syntax, part of the close, or all of it, and nothing of the continuation; the last sampled token shows where
its part ends. Example, with ChatML, a tool call and a new user message:

    syntax         "}}\\n</tool_call>
    close          <|im_end|>\\n
    continuation   <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenization.errors import InvalidMessages, TemplateUnsupported
from tokenization.messages import Message
from tokenization.template import Template, Tools

MARK = "qZassistantZq"
PLACEHOLDER_USER: dict[str, Any] = {"role": "user", "content": "."}


@dataclass(frozen=True, slots=True)
class Token:
    """An added token found in a text. The tokenizer never merges text across its edges."""

    id: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Tail:
    """What a template prints after the last text that the model wrote."""

    text: str
    """The tail when new messages follow the turn."""
    shared: int
    """Length of the common prefix of both tails, in characters: syntax and close of the turn."""
    text_if_last: str
    """The tail when the turn is the last message."""

    def without_start(self, length: int) -> "Tail":
        """The tail without its first `length` characters."""
        return Tail(self.text[length:], self.shared - length, self.text_if_last[length:])


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """Everything but the messages that a rendering depends on."""

    tools: Tools | None
    add_generation_prompt: bool
    kwargs: Mapping[str, Any]


def render_tail(
    template: Template, context: Sequence[Message], new: Sequence[Message], options: RenderOptions
) -> Tail:
    """Render `context`, whose last message is the assistant turn, with and without `new`; cut at the marker.

    Raises:
        InvalidMessages: the template refuses the messages in every form of the turn.
        TemplateUnsupported: the template prints nothing of an assistant turn.
    """
    refusal: InvalidMessages | None = None
    mark = unused_mark(context, new, options)
    for marked_turn in _marked(context[-1], mark):
        marked_context = [*context[:-1], marked_turn]
        try:
            followed = template.text(
                [*marked_context, *new], options.tools, options.add_generation_prompt, options.kwargs
            )
            last = template.text(marked_context, options.tools, False, options.kwargs)
        except InvalidMessages as error:
            refusal = error
            continue
        if mark in followed and mark in last:
            text, text_if_last = _text_after(followed, mark), _text_after(last, mark)
            return Tail(text, common_prefix_length(text, text_if_last), text_if_last)
    if refusal is not None:
        raise refusal
    raise TemplateUnsupported("the template prints nothing of an assistant turn")


def unused_mark(context: Sequence[Message], new: Sequence[Message], options: RenderOptions) -> str:
    """A marker that occurs in none of the arguments, so its only occurrence is where it was put."""
    source = repr((context, new, options.tools, options.kwargs))
    mark = MARK
    while mark in source:
        mark += "q"
    return mark


def _marked(turn: Message, mark: str) -> list[dict[str, Any]]:
    """Forms of the turn with the marker as the last text written, to be tried in order.

    A turn with tool calls has several forms: the marker in its last argument, with each kind of content (as
    in the turn, empty, null, text), and last the marker as its content.
    """
    # reasoning is printed before the marker, so it is no part of the tail
    content = {**turn, "content": mark}
    content.pop("reasoning", None)
    content.pop("reasoning_content", None)
    calls = turn.get("tool_calls")
    if not calls:
        return [content]
    marked_calls = [*calls[:-1], _marked_call(calls[-1], mark)]
    # some templates print no call next to content, and some print more after a turn that has content
    same_kind = mark if turn.get("content") else turn.get("content")
    texts = dict.fromkeys((same_kind, "", None, mark))
    return [*({**content, "content": text, "tool_calls": marked_calls} for text in texts), content]


def _marked_call(call: Mapping[str, Any], mark: str) -> dict[str, Any]:
    function = {**call["function"], "arguments": {"q": mark}}
    return {**call, "function": function}


def _text_after(text: str, mark: str) -> str:
    # the last occurrence: a marker that is both content and argument is printed twice
    return text[text.rfind(mark) + len(mark) :]


def common_prefix_length(first: str, second: str) -> int:
    """The number of characters that two texts have in common at their start."""
    for index, (left, right) in enumerate(zip(first, second, strict=False)):
        if left != right:
            return index
    return min(len(first), len(second))


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a tail is cut: the text before was sampled, or replaced by a token that was sampled."""

    position: int
    stop_text: str = ""
    """The template's stop token that ends at `position`; empty if the model did not close the turn."""
    rewritten: bool = False
    """Whether the model sampled another token where the template prints `stop_text`."""

    @property
    def closed(self) -> bool:
        """Whether the model closed the turn."""
        return bool(self.stop_text)


def cut_after_stop(
    tail: Tail, tokens: Sequence[Token], tokens_if_last: Sequence[Token], last_id: int
) -> Cut | None:
    """Cut a tail after the token `last_id`, which the model sampled last.

    Example: the tail `<|im_end|>\\n<|im_start|>user...` is cut after `<|im_end|>`.

    Args:
        tail: a tail without syntax: its shared part is the close.
        tokens: the added tokens in `tail.text`, in order.
        tokens_if_last: the added tokens in `tail.text_if_last`, in order.

    Returns:
        None if the template closes no such turn with that token.
    """
    closing = [token for token in tokens if token.end <= tail.shared]
    for token in reversed(closing):
        if token.id == last_id:
            return _cut_after(tail, token)
    # no close of its own: the token that ends the turn depends on whether a message follows
    token_if_followed = _token_at(tokens, tail.shared)
    token_if_last = _token_at(tokens_if_last, tail.shared)
    if closing or token_if_followed is None:
        return None
    if token_if_followed.id == last_id:
        return _cut_after(tail, token_if_followed)
    # GPT-OSS: the last turn ends with <|return|>, which becomes <|end|> when messages follow
    if token_if_last is not None and token_if_last.id == last_id:
        return _cut_after(tail, token_if_followed, rewritten=True)
    return None


def cut_after_other_stop(
    tail: Tail, tokens: Sequence[Token], tokens_if_last: Sequence[Token], opening: Collection[int]
) -> Cut:
    """Cut a tail after a stop token that the template never prints: it replaces the template's own.

    Args:
        opening: ids of tokens that open messages. Such a token is never replaced, even where it closes the
            turn: the next message would lack its opening.
    """
    closing = [token for token in tokens if token.end <= tail.shared]
    if closing:
        return Cut(0) if closing[-1].id in opening else _cut_after(tail, closing[-1], rewritten=True)
    token_if_followed = _token_at(tokens, tail.shared)
    if token_if_followed is not None and _token_at(tokens_if_last, tail.shared) is not None:
        return _cut_after(tail, token_if_followed, rewritten=True)
    return Cut(0)


def close_start(tail: Tail, tokens: Sequence[Token], content_close: str) -> int:
    """Where in a tail the turn's syntax ends and its close begins, in characters.

    Example: 12 in `</tool_call><|im_end|>\\n`, with the content close `<|im_end|>\\n`.

    Args:
        content_close: the text with which the template closes a turn without tool calls.
    """
    position = tail.text[: tail.shared].rfind(content_close)
    if not content_close or position >= 0:
        return position if content_close else tail.shared
    # turns with tool calls have a close of their own: take the last added token
    closing = [token for token in tokens if token.end <= tail.shared]
    return closing[-1].start if closing else tail.shared


def _cut_after(tail: Tail, token: Token, *, rewritten: bool = False) -> Cut:
    return Cut(token.end, tail.text[token.start : token.end], rewritten)


def _token_at(tokens: Sequence[Token], position: int) -> Token | None:
    return next((token for token in tokens if token.start == position), None)


def skeleton(history: Sequence[Message]) -> list[dict[str, Any]]:
    """Reduce a conversation to what decides the text after its last turn.

    What remains is a system message, a user message and the last turn with the names and ids of its tool
    calls, all with placeholder text. Conversations with equal skeletons share one rendering.
    """
    turn: dict[str, Any] = {"role": "assistant", "content": _placeholder_content(history[-1])}
    if calls := history[-1].get("tool_calls"):
        turn["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": {"q": "."}}} for call in calls
        ]
    first = history[0]
    system = [{"role": first["role"], "content": "."}] if first.get("role") in ("system", "developer") else []
    return [*system, PLACEHOLDER_USER, turn]


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """Contexts in which the same new messages should render to the same tail."""

    contexts: list[list[dict[str, Any]]]
    """The template must render each of these."""
    optional: list[list[dict[str, Any]]] = field(default_factory=list)
    """Turns of other kinds, which the template may refuse."""
    longer: list[list[dict[str, Any]]] = field(default_factory=list)
    """The same turn after more messages, which the template may refuse."""


def placeholder_contexts(new: Sequence[Message], history: Sequence[Message] | None) -> Iterator[ContextGroup]:
    """Yield groups of contexts to render `new` in, the group with the fewest details of `history` first.

    The first group whose contexts all render to the same tail is used: the tail then depends on no detail
    that differs between them. Example, for a tool result without history: a turn that calls the tool
    "alpha", and one that calls "omega".
    """
    leading = next((i for i, message in enumerate(new) if message.get("role") != "tool"), len(new))
    results = new[:leading]
    if history is None:
        pair = [_placeholder_turn(leading, name, results, ".") for name in ("alpha", "omega")]
        optional = [_placeholder_turn(leading, "alpha", results, content) for content in ("", None)]
        without_calls = _placeholder_turn(0, "alpha", [], ".")
        yield ContextGroup(pair, [*optional, without_calls] if leading else [], _longer(pair[0]))
        return
    calls, content = history[-1].get("tool_calls") or [], _placeholder_content(history[-1])
    pair = [_placeholder_turn(len(calls), name, results, content) for name in ("alpha", "omega")]
    yield ContextGroup(pair, longer=_longer(pair[0]))
    # names and ids of the calls matter: use those of the history
    reduced = skeleton(history)
    yield ContextGroup([reduced], longer=_longer(reduced))


def _longer(context: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    without_system = [message for message in context if message["role"] not in ("system", "developer")]
    system = {"role": "system", "content": "qZsystemZq"}
    exchange = [PLACEHOLDER_USER, {"role": "assistant", "content": "."}]
    return [[*exchange, *without_system], [system, *without_system], [system, *exchange, *without_system]]


def _placeholder_content(turn: Message) -> str | None:
    """Placeholder text, an empty text or None, whichever the content of the turn is."""
    content = turn.get("content")
    return "." if content else None if content is None else ""


def _placeholder_turn(
    count: int, name: str, results: Sequence[Message], content: str | None
) -> list[dict[str, Any]]:
    """A user message and a turn with `count` tool calls, matching the names and ids in `results`.

    Args:
        name: name of each tool, and start of each call id, where `results` has none.
    """
    turn: dict[str, Any] = {"role": "assistant", "content": content}
    calls = []
    for index in range(count):
        result = results[index] if index < len(results) else {}
        function = {"name": result.get("name") or name, "arguments": {"q": "."}}
        call_id = result.get("tool_call_id") or f"{name}{index}"
        calls.append({"id": call_id, "type": "function", "function": function})
    if calls:
        turn["tool_calls"] = calls
    return [PLACEHOLDER_USER, turn]


FIRST_RESULT, SECOND_RESULT = "qZfirstZq", "qZsecondZq"


def two_tool_results() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A turn with two tool calls, and their results: the text between these closes one and opens the next."""
    results = [
        {"role": "tool", "tool_call_id": f"call0000{index}", "name": "alpha", "content": content}
        for index, content in enumerate((FIRST_RESULT, SECOND_RESULT))
    ]
    return _placeholder_turn(2, "alpha", results, ""), results
