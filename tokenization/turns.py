"""How a template goes on after an assistant turn, read off its own renderings.

A turn is rendered with a mark as the last thing the model wrote. What stands behind the mark holds, in this
order: the rest of the turn's own syntax (the brackets of a tool call), the tokens that close the turn, and
what follows (separators, new messages, the generation prompt). The model sampled the first of these, some of
the second and none of the third; where its part ends is decided by the last token it sampled.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenization.errors import InvalidMessages, TemplateUnsupported
from tokenization.messages import Message
from tokenization.template import Template, Tools

MARK = "qZassistantZq"
ASKING: dict[str, Any] = {"role": "user", "content": "."}


@dataclass(frozen=True, slots=True)
class Token:
    """A token of its own in a text: no merge reaches across its edges."""

    id: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Tail:
    """What a template puts behind the last thing that the model wrote."""

    text: str
    shared: int
    """So many characters of it stand there too when nothing follows: syntax and close of the turn."""
    alone: str
    """What stands there when nothing follows."""

    def without(self, syntax: int) -> "Tail":
        """The tail without its first characters."""
        return Tail(self.text[syntax:], self.shared - syntax, self.alone[syntax:])


@dataclass(frozen=True, slots=True)
class Setting:
    """What a rendering depends on beside its messages."""

    tools: Tools | None
    add_generation_prompt: bool
    kwargs: Mapping[str, Any]


def tail(template: Template, turn: Sequence[Message], new: Sequence[Message], setting: Setting) -> Tail:
    """Render `turn` (context, with the assistant turn last) and `new` behind it; cut at the mark.

    Raises:
        InvalidMessages: the template refuses the messages in every form of the turn.
        TemplateUnsupported: the template prints nothing of an assistant turn.
    """
    refused: InvalidMessages | None = None
    mark = free_mark(turn, new, setting)
    for marked in _marked(turn[-1], mark):
        context = [*turn[:-1], marked]
        try:
            whole = template.text(
                [*context, *new], setting.tools, setting.add_generation_prompt, setting.kwargs
            )
            alone = template.text(context, setting.tools, False, setting.kwargs)
        except InvalidMessages as error:
            refused = error
            continue
        if mark in whole and mark in alone:
            behind, ending = _behind(whole, mark), _behind(alone, mark)
            return Tail(behind, shared_length(behind, ending), ending)
    if refused is not None:
        raise refused
    raise TemplateUnsupported("the template prints nothing of an assistant turn")


def free_mark(turn: Sequence[Message], new: Sequence[Message], setting: Setting) -> str:
    """A mark that occurs in nothing that is rendered."""
    source = repr((turn, new, setting.tools, setting.kwargs))
    mark = MARK
    while mark in source:
        mark += "q"
    return mark


def _marked(turn: Message, mark: str) -> list[dict[str, Any]]:
    """The turn with the mark as the last thing written, in the forms that templates tell apart."""
    content = {**turn, "content": mark}
    content.pop("reasoning", None)
    content.pop("reasoning_content", None)
    calls = turn.get("tool_calls")
    if not calls:
        return [content]
    marked_calls = [*calls[:-1], _marked_call(calls[-1], mark)]
    # some templates print no call beside content, and some print more behind a turn that has any
    like_it = mark if turn.get("content") else turn.get("content")
    texts = dict.fromkeys((like_it, "", None, mark))
    return [*({**content, "content": text, "tool_calls": marked_calls} for text in texts), content]


def _marked_call(call: Mapping[str, Any], mark: str) -> dict[str, Any]:
    function = {**call["function"], "arguments": {"q": mark}}
    return {**call, "function": function}


def _behind(text: str, mark: str) -> str:
    return text[text.rfind(mark) + len(mark) :]


def shared_length(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a tail is cut: what stands before was sampled, or stands for something that was."""

    at: int
    left: str = ""
    """The token that ends there, if the turn is closed: the one sampled, or the one that it stands for."""
    rewritten: bool = False
    """Whether the template would have shown that token in place of the one that was sampled."""

    @property
    def closed(self) -> bool:
        """Whether the model closed the turn."""
        return bool(self.left)


def cut_after_stop(close: Tail, tokens: Sequence[Token], alone: Sequence[Token], last_id: int) -> Cut | None:
    """Where a tail that begins with the close goes on after a turn that ended with the token `last_id`.

    Args:
        tokens: tokens of their own in `close.text`, in order.
        alone: the same for `close.alone`.

    Returns:
        None if the template closes no such turn with that token.
    """
    closing = [token for token in tokens if token.end <= close.shared]
    for token in reversed(closing):
        if token.id == last_id:
            return _after(close, token)
    following, shown = _at(tokens, close.shared), _at(alone, close.shared)
    if closing or following is None:
        return None
    if following.id == last_id:
        return _after(close, following)
    if shown is not None and shown.id == last_id:
        return _after(close, following, rewritten=True)
    return None


def cut_after_other_stop(
    close: Tail, tokens: Sequence[Token], alone: Sequence[Token], opening: Collection[int]
) -> Cut:
    """Where the tail goes on after a stop token that the template does not know: it stands for the close.

    Args:
        opening: tokens that open messages; where one of them closes the turn too, it is not stood for.
    """
    closing = [token for token in tokens if token.end <= close.shared]
    if closing:
        return Cut(0) if closing[-1].id in opening else _after(close, closing[-1], rewritten=True)
    following = _at(tokens, close.shared)
    if following is not None and _at(alone, close.shared) is not None:
        return _after(close, following, rewritten=True)
    return Cut(0)


def close_start(found: Tail, tokens: Sequence[Token], content_close: str) -> int:
    """Where the syntax of a turn ends in its tail, and its close begins.

    Args:
        content_close: how the template closes a turn that is only text.
    """
    at = found.text[: found.shared].rfind(content_close)
    if not content_close or at >= 0:
        return at if content_close else found.shared
    inside = [token for token in tokens if token.end <= found.shared]
    return inside[-1].start if inside else found.shared


def _after(close: Tail, token: Token, *, rewritten: bool = False) -> Cut:
    return Cut(token.end, close.text[token.start : token.end], rewritten)


def _at(tokens: Sequence[Token], position: int) -> Token | None:
    return next((token for token in tokens if token.start == position), None)


def skeleton(history: Sequence[Message]) -> list[dict[str, Any]]:
    """The shape of a conversation that decides what follows its last turn: no text, few messages.

    System message, a question and the last turn with the names and ids of its tool calls; what was said is
    replaced, so that conversations of one shape share one rendering.
    """
    turn: dict[str, Any] = {"role": "assistant", "content": _presence(history[-1])}
    if calls := history[-1].get("tool_calls"):
        turn["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": {"q": "."}}} for call in calls
        ]
    first = history[0]
    kept = [{"role": first["role"], "content": "."}] if first.get("role") in ("system", "developer") else []
    return [*kept, ASKING, turn]


@dataclass(frozen=True, slots=True)
class StandIns:
    """Contexts that differ in what must not matter to what follows."""

    contexts: list[list[dict[str, Any]]]
    where_possible: list[list[dict[str, Any]]] = field(default_factory=list)
    """Contexts that a template may refuse."""
    longer: list[list[dict[str, Any]]] = field(default_factory=list)
    """The same turn behind more conversation, which a template may refuse too."""


def stand_ins(new: Sequence[Message], history: Sequence[Message] | None) -> Iterator[StandIns]:
    """Contexts for the rendering of `new`, the most shared first.

    Where those of one group lead to different tails, or the template refuses them, the next group is tried.
    """
    leading = next((i for i, message in enumerate(new) if message.get("role") != "tool"), len(new))
    results = new[:leading]
    if history is None:
        two = [_stand_in(leading, spelling, results, ".") for spelling in ("alpha", "omega")]
        others = [_stand_in(leading, "alpha", results, content) for content in ("", None)]
        yield StandIns(two, [*others, _stand_in(0, "alpha", [], ".")] if leading else [], _longer(two[0]))
        return
    calls, content = history[-1].get("tool_calls") or [], _presence(history[-1])
    two = [_stand_in(len(calls), spelling, results, content) for spelling in ("alpha", "omega")]
    yield StandIns(two, longer=_longer(two[0]))
    bones = skeleton(history)
    yield StandIns([bones], longer=_longer(bones))


def _longer(context: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    bare = [message for message in context if message["role"] not in ("system", "developer")]
    system, earlier = (
        {"role": "system", "content": "qZsystemZq"},
        [ASKING, {"role": "assistant", "content": "."}],
    )
    return [[*earlier, *bare], [system, *bare], [system, *earlier, *bare]]


def _presence(turn: Message) -> str | None:
    """Content that is there, empty or missing like that of the turn."""
    content = turn.get("content")
    return "." if content else None if content is None else ""


def _stand_in(
    count: int, spelling: str, results: Sequence[Message], content: str | None
) -> list[dict[str, Any]]:
    """A turn with `count` calls, in one of two spellings; ids and names are those that the results name."""
    turn: dict[str, Any] = {"role": "assistant", "content": content}
    calls = []
    for index in range(count):
        known = results[index] if index < len(results) else {}
        name = known.get("name") or spelling
        identity = known.get("tool_call_id") or f"{spelling}{index}"
        calls.append(
            {"id": identity, "type": "function", "function": {"name": name, "arguments": {"q": "."}}}
        )
    if calls:
        turn["tool_calls"] = calls
    return [ASKING, turn]


FIRST_RESULT, SECOND_RESULT = "qZfirstZq", "qZsecondZq"


def two_results() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A turn with two calls, and their results: what stands between these opens a message or closes one."""
    results = [
        {"role": "tool", "tool_call_id": f"call0000{index}", "name": "alpha", "content": content}
        for index, content in enumerate((FIRST_RESULT, SECOND_RESULT))
    ]
    return _stand_in(2, "alpha", results, ""), results
