"""Finds the text that a chat template prints after an assistant turn, from its own renderings.

A turn is rendered with a marker as the last text that the model wrote. After the marker the rendering holds,
in this order: the rest of the turn's own syntax (the closing brackets of a tool call), the text that closes
the turn, and the continuation (separators, new messages, generation prompt). Example, with ChatML, a tool
call and a new user message:

    syntax         "}}\\n</tool_call>
    close          <|im_end|>\\n
    continuation   <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n

The continuation begins with the header of the first new message, here `<|im_start|>user\\n`. Syntax, close
and header are the tail's *lead*: the last sampled token shows how much of it the model sampled. To find its
end, and to prove that each new text is printed exactly once, the conversation is rendered a second time with
markers in place of the new texts.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chat_tokenizer.added_tokens import common_prefix_length
from chat_tokenizer.cache import digest
from chat_tokenizer.errors import InvalidMessages, TemplateUnsupported
from chat_tokenizer.messages import Message, arguments_of
from chat_tokenizer.new_texts import (
    Marks,
    escaped,
    has_text,
    last_text,
    unused_marks,
    with_argument,
    with_last_text,
    with_marks,
)
from chat_tokenizer.renderer import Append, Renderer, RenderOptions

TURN_NOT_PRINTED = "turn_not_printed"
"""A note: the template prints nothing of the turn's tool calls, or not its content."""
MARK = "qZassistantZq"
_PARTS = (("'text': '", "'}]"), ("'text': \"", '"}]'), ('"text": "', '"}]'))
"""The text before and after a text in a list of parts, as Python and as JSON print it. Python writes a text
with an apostrophe in double quotes."""
_NUMBER = re.compile("[0-9]+")
_QUOTES = 16
"""Tried from the end of a call's arguments, to find where their last text ends."""
PLACEHOLDER_USER: dict[str, Any] = {"role": "user", "content": "."}


@dataclass(frozen=True, slots=True)
class Tail:
    """The text that a template prints after the last text that the model wrote."""

    text: str
    """The tail if new messages follow the turn."""
    lead: int
    """Length of the text before the first new text, in characters: syntax, close, header."""
    text_if_last: str
    """The tail if the turn is the last message; empty if the template cannot print that."""
    in_call: bool = False
    """Whether that text is an argument of a tool call, so that the tail starts with the call's own syntax."""
    notes: tuple[str, ...] = ()
    """How the rendered turn differs from the one that was given: see `Appended.notes`."""
    foot: int = 0
    """Length of the text after the last new text, in characters: its close, and the generation prompt."""


@dataclass(frozen=True, slots=True)
class Marked:
    """A rendering of a conversation with a marker at the end of its last turn."""

    messages: list[Message]
    """The messages up to the turn, with the marker."""
    turn: Message
    """The turn without the marker."""
    mark: str
    before: str
    """The text before the marker."""
    after: str
    """The text after it."""
    replaced: bool
    """Whether the marker is a new argument or content, not the end of an existing one."""
    notes: tuple[str, ...]
    """See `Tail.notes`."""
    text: str
    """The text after the turn's last text, also where content is printed as a list of parts."""
    in_call: bool
    """Whether the marker is in the arguments of a tool call."""

    def agrees_with(self, unmarked: str, tail: str) -> bool:
        """Whether a rendering without the marker is equal, so that no condition depends on the marker.

        Args:
            tail: the end of `text` that follows the turn's own syntax.
        """
        if self.replaced:
            return unmarked.endswith(tail) and self._lacks_only_the_turn(unmarked.removesuffix(tail), tail)
        # a template may strip a text at its end, but not the text before a turn without one
        written = [last_text(self.turn), self.turn.get("reasoning"), self.turn.get("reasoning_content")]
        before = self.before.rstrip() if any(text and text.strip() for text in written) else self.before
        end = len(unmarked) - len(self.after)
        if len(before) > end or not (unmarked.startswith(before) and unmarked.endswith(self.after)):
            return False
        return not unmarked[len(before) : end].strip()

    def _lacks_only_the_turn(self, unmarked: str, tail: str) -> bool:
        """Whether each word that a rendering up to the tail lacks with the marker is one of the turn.

        Example: `f{n: 5}` for a call without text arguments, where the marker stands in `f{n: 5, q: "..."}`.
        """
        marked = f"{self.before}{self.mark}{self.text.removesuffix(tail)}"
        start = common_prefix_length(unmarked, marked)
        end = common_prefix_length(unmarked[start:][::-1], marked[start:][::-1])
        turn = repr(self.turn)
        return all(word in turn for word in re.findall(r"\w+", unmarked[start : len(unmarked) - end]))


def render_tail(template: Renderer, append: Append, guide: Tail | None = None) -> tuple[Tail, Marked]:
    """Render a context and new messages; cut at the marker.

    Args:
        guide: the tail of the same turn in a smaller context. If the tail differs from it in numbers at most,
            the context is rendered only once.

    Raises:
        InvalidMessages: the template refuses the messages in every form of the turn.
        TemplateUnsupported: the template prints nothing of an assistant turn, or a marker not exactly once.
    """
    marks = unused_marks(append)
    marked = _render_marked(template, append, marks)
    same_form = guide is not None and (guide.in_call, guide.notes) == (marked.in_call, marked.notes)
    tail = _like(guide, marked.text) if guide is not None and same_form else None
    if tail is None:
        lead, foot = _around_new_texts(template, append.after(marked.messages), marks, marked.text)
        tail = Tail(
            marked.text,
            common_prefix_length(marked.text, lead),
            _tail_if_last(template, append.after(marked.messages), marks.turn),
            marked.in_call,
            marked.notes,
            len(foot) if marked.text.endswith(foot) else 0,
        )
    return tail, marked


def tail_shown(text: str, context: Sequence[Message], guide: Tail, close: str) -> Tail | None:
    """The tail of a turn at the end of a rendering without a marker; None if that alone does not show it.

    It begins where the turn's last text and its close are found first, after the text of the message before
    the turn. If the template prints the turn's text again, what follows is not like the guide. Between a text
    that ends with a digit and a number, no place is shown.

    Args:
        guide: the tail of the same turn in a smaller context.
        close: its start up to the last token of the close.
    """
    written = last_text(context[-1])
    # its first place: if an earlier message has the same text, an earlier turn may be found
    before = context[-2].get("content") if context[1:] else None
    begin = max(0, text.find(before.strip())) if isinstance(before, str) else 0
    for form in (written.strip(), *escaped(written)):
        start = text.find(form + close, begin) if written.strip() else -1
        if start >= 0:
            tail = text[start + len(form) :]
            return None if form[-1].isdigit() and tail[:1].isdigit() else _like(guide, tail)
    return None


def _like(guide: Tail, text: str) -> Tail | None:
    """The tail with this text, if it differs from the guide in numbers of its lead at most, after the close.

    Example: the guide's `<|im_end|>\\n<|im_start|>tool\\nResult 1: qr<|im_end|>\\n` and a text that has
    `Result 12: ` there.
    """
    if text == guide.text:
        return guide
    rest, close = guide.text[guide.lead :], len(guide.text_if_last)
    lead = text[: len(text) - len(rest)]
    same = common_prefix_length(text, guide.text)
    while same and guide.text[same - 1].isdigit():
        same -= 1  # where the first number that differs begins
    alike = _NUMBER.sub("0", lead) == _NUMBER.sub("0", guide.text[: guide.lead])
    if not (0 < close <= same and alike and text.endswith(rest)):
        return None
    return replace(guide, text=text, lead=len(lead))


def _render_marked(template: Renderer, append: Append, marks: Marks) -> Marked:
    """Render a context and new messages, with a marker in the turn.

    Raises: as `render_tail`.
    """
    mark = marks.turn
    refusal: InvalidMessages | None = None
    for turn, replaced, notes in _marked_forms(append.turn, mark):
        marked = [*append.context[:-1], turn]
        try:
            text = template.text([*marked, *append.new], append.options)
        except InvalidMessages as error:
            refusal = error
            continue
        before, found, after = text.partition(mark)
        if mark in after:
            raise TemplateUnsupported("the template prints the text of a turn more than once")
        if found:
            text = _without_part_closing(before, after)
            in_call = mark in repr(turn.get("tool_calls"))
            return Marked(marked, append.turn, mark, before, after, replaced, notes, text, in_call)
    if refusal is not None:
        raise refusal
    raise TemplateUnsupported("the template prints nothing of an assistant turn")


def _remembered(template: Renderer, messages: Sequence[Message], options: RenderOptions) -> str:
    """A rendering in which markers stand for all texts, so that most appends of its kind need the same."""
    if template.remembered is None or "chat_template" in options.kwargs:
        return template.text(messages, options)
    key = digest(list(messages), options.key(), template.now())
    return template.remembered.get_or_make(key, lambda: template.text(messages, options))


def _tail_if_last(template: Renderer, marked: Append, mark: str) -> str:
    try:
        text = _remembered(template, marked.context, replace(marked.options, add_generation_prompt=False))
    except InvalidMessages:
        return ""
    before, _, after = text.partition(mark)
    return "" if mark in after else _without_part_closing(before, after)


def _marked_forms(turn: Message, mark: str) -> Iterator[tuple[dict[str, Any], bool, tuple[str, ...]]]:
    """The turn with the marker as the last text written, and other forms to try if that is not printed.

    The marker is in the arguments of a tool call, of the last one if that is printed, or at the end of the
    content. Yields each form with `Marked.replaced`, and with notes on what the template does not print.
    """
    calls = turn.get("tool_calls") or []
    for index in reversed(range(len(calls))):
        # GPT-OSS prints the first call only
        notes = (TURN_NOT_PRINTED,) if index < len(calls) - 1 else ()
        call, replaced = _marked_call(calls[index], mark)
        yield {**turn, "tool_calls": [*calls[:index], call, *calls[index + 1 :]]}, replaced, notes
    content = turn.get("content")
    notes = (TURN_NOT_PRINTED,) if calls else ()
    if isinstance(content, str) and content:
        yield {**turn, "content": content + mark}, False, notes
    elif isinstance(content, list) and content:
        last = content[-1]
        if isinstance(last, Mapping) and isinstance(last.get("text"), str):
            yield {**turn, "content": [*content[:-1], {**last, "text": last["text"] + mark}]}, False, notes
        yield {**turn, "content": [*content, {"type": "text", "text": mark}]}, True, notes
    yield {**turn, "content": mark}, bool(content), notes or ((TURN_NOT_PRINTED,) if content else ())


def _marked_call(call: Mapping[str, Any], mark: str) -> tuple[dict[str, Any], bool]:
    """A call with the marker at the end of the last text in its arguments, or as one more argument."""
    arguments = arguments_of(call["function"])
    marked = with_last_text(arguments, mark)
    added = {**arguments, "q": mark} if marked is None else marked
    if isinstance(text := call["function"].get("arguments"), str) and marked is not None:
        added = _spelled_like(text, marked, mark)
    return {**call, "function": {**call["function"], "arguments": added}}, marked is None


def _spelled_like(arguments: str, marked: Mapping[str, Any], mark: str) -> Mapping[str, Any] | str:
    """Marked arguments as the text that the model wrote: some engines print its white space and escapes."""
    quotes = [index for index, letter in enumerate(arguments) if letter == '"'][-_QUOTES:]
    texts = (arguments[:index] + mark + arguments[index:] for index in reversed(quotes))
    return next((text for text in texts if arguments_of({"arguments": text}) == marked), marked)


def _reduced_call(call: Mapping[str, Any]) -> dict[str, Any]:
    if call["function"].get("arguments") in (None, "", "{}", {}):
        return {**call, "function": {**call["function"], "arguments": {}}}
    return with_argument(call, ".")


def _without_part_closing(before: str, after: str) -> str:
    """The text after a turn, also where its content is printed as a list of parts.

    The model wrote the text alone, without the end of the list.
    """
    for opening, closing in _PARTS:
        if after.startswith(closing) and before.rfind(opening) > before.rfind(closing):
            return after[len(closing) :]
    return after


def _around_new_texts(template: Renderer, marked: Append, marks: Marks, text: str) -> tuple[str, str]:
    """The text between the turn and the first new text, and the text after the last one.

    Both are from a rendering with markers as the new texts, and as what the model wrote before its last text.

    Args:
        text: what is printed after the turn without these markers.

    Raises:
        TemplateUnsupported: a new text is not printed exactly once after the turn, or text of the turn is
            printed after it.
    """
    turn = dict(marked.turn)
    if turn.get("tool_calls") and turn.get("content") and marks.turn not in repr(turn["content"]):
        turn["content"] = marks.content
    turn.update((name, marks.content) for name in ("reasoning", "reasoning_content") if turn.get(name))
    around = _around(template, marked, turn, marks)
    if text.startswith(around[0]) or turn == marked.turn:
        return around
    # what is printed depends on the text that a marker replaced
    return _around(template, marked, dict(marked.turn), marks)


def _around(template: Renderer, marked: Append, turn: dict[str, Any], marks: Marks) -> tuple[str, str]:
    """As `_around_new_texts`, for one form of the turn."""
    words: dict[str, int] = {}
    messages = [with_marks(message, index, marks, words) for index, message in enumerate(marked.new)]
    try:
        whole = _remembered(template, [*marked.context[:-1], turn, *messages], marked.options)
    except InvalidMessages as error:
        raise TemplateUnsupported(
            f"the template does not take other text in the place of a new message: {error}"
        ) from error
    before, found, after = whole.partition(marks.turn)
    if not found:
        raise TemplateUnsupported("whether the template prints a turn depends on the text after it")
    if marks.content in after:
        raise TemplateUnsupported("the template prints what a turn begins with after its last text")
    # one pass over a text, because there may be thousands of messages
    new = re.compile(rf"{marks.new}\d+p\d+Zq")
    earlier, later = (Counter(new.findall(text)) for text in (before, after))
    for word, index in words.items():
        if word in earlier or later[word] != 1:
            times = earlier[word] + later[word]
            where = "before the turn" if word in earlier else f"{times} times"
            raise TemplateUnsupported(
                f"the template prints new message {index} ({marked.new[index].get('role')}) {where}"
            )
    after = _without_part_closing(before, after)
    printed: dict[str, tuple[int, int]] = {}
    for match in new.finditer(after):
        printed.setdefault(match.group(), match.span())
    if not printed:
        return after, ""
    return after[: min(printed.values())[0]], after[max(printed.values())[1] :]


def turn_context(turn: Message) -> list[dict[str, Any]]:
    """Reduce a conversation to a user message and its last turn, with placeholder text.

    The turn keeps the names and ids of its tool calls, whether they have arguments, and which kinds of
    content it has. Conversations with equal contexts share one rendering.
    """
    content = turn.get("content")
    reduced: dict[str, Any] = {"role": "assistant", "content": "." if has_text(content) else content}
    if turn.get("name"):
        reduced["name"] = turn["name"]
    if turn.get("reasoning") or turn.get("reasoning_content"):
        reduced["reasoning"] = "."
    if calls := turn.get("tool_calls"):
        reduced["tool_calls"] = [_reduced_call(call) for call in calls]
    return [PLACEHOLDER_USER, reduced]


def placeholder_context(new: Sequence[Message]) -> list[dict[str, Any]]:
    """A user message and a turn that new messages could follow: it calls a tool for each leading result."""
    leading = next((i for i, message in enumerate(new) if message.get("role") != "tool"), len(new))
    turn: dict[str, Any] = {"role": "assistant", "content": "" if leading else "."}
    calls = []
    for index, result in enumerate(new[:leading]):
        function = {"name": result.get("name") or "alpha", "arguments": {"q": "."}}
        call_id = result.get("tool_call_id") or f"call{index:05}"
        calls.append({"id": call_id, "type": "function", "function": function})
    if calls:
        turn["tool_calls"] = calls
    return [PLACEHOLDER_USER, turn]
