"""Examines a chat template: how it closes turns, what it prints between them, and which appends are exact."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenization.chat import ChatTokenizer
from tokenization.discovery import Ending
from tokenization.errors import TokenizationError
from tokenization.messages import Message
from tokenization.turns import MARK

_USER: dict[str, Any] = {"role": "user", "content": "What is the weather in Paris?"}
_NEXT: dict[str, Any] = {"role": "user", "content": "And in Rome?"}
_SYSTEM: dict[str, Any] = {"role": "system", "content": "You are brief."}
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
# such as <|im_end|> (also with full-width bars), <|turn>, <turn|>, <start_of_turn>, </think>, [TOOL_CALLS]
_ADDED_TOKEN = re.compile(
    r"<[|\uff5c][^<>|\uff5c\s]+[|\uff5c]>|<\|?[a-z_\"]+\|>|<\|[a-z_\"]+>|</?[a-z][a-z_]*>|</s>|<s>|\[/?[A-Z_]{3,}\]"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of conversation, and whether messages can be appended to it exactly."""

    name: str
    exact: bool
    reason: str
    """Why the append is refused; empty if it is exact."""


@dataclass(frozen=True, slots=True)
class Report:
    """The findings about a template."""

    source: str
    close: str | None
    """Text that closes a turn without tool calls; None if the template prints no such turn."""
    tool_close: str | None
    """Text that closes a turn with tool calls; None if the template prints no such turn."""
    stop_tokens: list[str]
    """Stop tokens that the template prints at the end of turns."""
    opening_stops: list[str]
    """Tokens that end a turn by opening the next message; only in templates whose turns have no close."""
    before_user: str | None
    """Text between a closed turn and the content of a user message."""
    after_user: str | None
    """Text between the content of a user message and the completion."""
    append_only: bool
    """Whether the rendering of a history does not change when messages follow."""
    thinking_stripped: bool | None
    """Whether reasoning is dropped from a turn when a user message follows; None if it is never printed."""
    after_messages: str
    """Which messages determine the text after a turn if a user message follows: see
    `tokenization.locality`."""
    after_results: str
    """Which messages determine it if tool results follow."""
    locality_reason: str
    """A conversation that shows why more than the new messages determine it; empty if they suffice."""
    shapes: list[Shape]

    @property
    def exact(self) -> bool:
        """Whether messages can be appended exactly to every shape."""
        return all(shape.exact for shape in self.shapes)

    def as_dict(self) -> dict[str, Any]:
        """The report as values that JSON can hold."""
        return asdict(self)


def load_for_check(source: str) -> ChatTokenizer:
    """Load the tokenizer of a model, or build one for a template file.

    A template file has no vocabulary. Its tokenizer has a token for each byte, and an added token for each
    text in the template that looks like one, such as `<|im_end|>`.

    Args:
        source: path of a Jinja file, a model folder, or the name of a model on the Hugging Face hub.

    Raises:
        TokenizerUnavailable: `source` is not a file, and no model can be loaded from it.
    """
    path = Path(source)
    if not path.is_file():
        return ChatTokenizer.load(source)
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    text = path.read_text()
    alphabet = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    added = sorted({*_ADDED_TOKEN.findall(text), "<|bos|>", "<|eos|>"})
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in added])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|bos|>", eos_token="<|eos|>")
    tokenizer.chat_template = text
    return ChatTokenizer(source, len(tokenizer), tokenizer, backend.to_str())


def check(tokenizer: ChatTokenizer) -> Report:
    """Examine a template. Refusals of the template are part of the report, not raised."""
    proof = tokenizer.prove()
    turn = {"role": "assistant", "content": "Sunny."}
    content_ending = _ending(tokenizer, [_USER, turn], [_NEXT], None)
    call_ending = _ending(tokenizer, [_USER, _turn_with_calls(1)], _results(1), _TOOLS)
    endings = [ending for ending in (content_ending, call_ending) if ending is not None]
    before, after = _text_around(content_ending, str(_NEXT["content"]))
    return Report(
        source=tokenizer.source,
        close=content_ending.close if content_ending else None,
        tool_close=call_ending.close if call_ending else None,
        stop_tokens=list(dict.fromkeys(stop for ending in endings for stop in ending.stops)),
        opening_stops=list(dict.fromkeys(ending.opening for ending in endings if ending.opening)),
        before_user=before,
        after_user=after,
        append_only=_append_only(tokenizer, [_USER, turn], [_NEXT]),
        thinking_stripped=_thinking_stripped(tokenizer),
        after_messages=str(proof.after_messages),
        after_results=str(proof.after_results),
        locality_reason=proof.reason,
        shapes=[
            _try_append(tokenizer, name, *conversation) for name, conversation in _conversations().items()
        ],
    )


def _conversations() -> dict[str, tuple[list[Message], list[Message], list[dict[str, Any]] | None]]:
    """Conversations by name of their shape: history, new messages, tools."""
    turn = {"role": "assistant", "content": "Sunny."}
    thinking = {**turn, "reasoning_content": "Let me see."}
    parts = {
        "role": "user",
        "content": [{"type": "text", "text": "And in"}, {"type": "text", "text": "Rome?"}],
    }
    return {
        "content, user": ([_USER, turn], [_NEXT], None),
        "system, content, user": ([_SYSTEM, _USER, turn], [_NEXT], None),
        "reasoning, user": ([_USER, thinking], [_NEXT], None),
        "list content": ([_USER, turn], [parts], None),
        "tool call, result": ([_USER, _turn_with_calls(1)], _results(1), _TOOLS),
        "parallel calls, results": ([_USER, _turn_with_calls(2)], _results(2), _TOOLS),
        "tool call, result, user": ([_USER, _turn_with_calls(1)], [*_results(1), _NEXT], _TOOLS),
    }


def _try_append(
    tokenizer: ChatTokenizer,
    name: str,
    history: list[Message],
    new: list[Message],
    tools: list[dict[str, Any]] | None,
) -> Shape:
    try:
        # no id is -1: the turn was cut off, and all of its close must be appended
        tokenizer.continuation(-1, new, history=history, tools=tools, finish_reason="length")
    except TokenizationError as error:
        return Shape(name, False, str(error))
    return Shape(name, True, "")


def _ending(
    tokenizer: ChatTokenizer, history: list[Message], new: list[Message], tools: list[dict[str, Any]] | None
) -> Ending | None:
    try:
        return tokenizer.ending(new, history=history, tools=tools)
    except TokenizationError:
        return None


def _text_around(ending: Ending | None, content: str) -> tuple[str | None, str | None]:
    if ending is None or content not in ending.after_close:
        return None, None
    before, _, after = ending.after_close.partition(content)
    return before, after


def _append_only(tokenizer: ChatTokenizer, history: list[Message], new: list[Message]) -> bool:
    try:
        before = tokenizer.text(history, add_generation_prompt=False)
        return tokenizer.text([*history, *new]).startswith(before)
    except TokenizationError:
        return False


def _thinking_stripped(tokenizer: ChatTokenizer) -> bool | None:
    turn = {"role": "assistant", "content": "Sunny.", "reasoning_content": MARK}
    try:
        if MARK not in tokenizer.text([_USER, turn], add_generation_prompt=False):
            return None
        return MARK not in tokenizer.text([_USER, turn, _NEXT])
    except TokenizationError:
        return None


def _turn_with_calls(count: int) -> dict[str, Any]:
    calls = [
        {
            "id": f"call{index:05}",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
        }
        for index in range(count)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _results(count: int) -> list[Message]:
    return [
        {"role": "tool", "tool_call_id": f"call{index:05}", "name": "get_weather", "content": "17 °C"}
        for index in range(count)
    ]


def table(report: Report) -> str:
    """The report as a text table."""
    rows: Sequence[tuple[str, object]] = [
        ("template", report.source),
        ("closes a turn with", _quoted(report.close)),
        ("closes a tool call with", _quoted(report.tool_close)),
        ("stop tokens", ", ".join(report.stop_tokens) or "none"),
        ("stops that open the next", ", ".join(report.opening_stops) or "none"),
        ("before user text", _quoted(report.before_user)),
        ("after user text", _quoted(report.after_user)),
        ("history is append-only", "yes" if report.append_only else "no"),
        (
            "thinking stripped",
            {True: "yes", False: "no", None: "never printed"}[report.thinking_stripped],
        ),
        ("after a turn depends on", f"the {report.after_messages}"),
        ("after results depends on", f"the {report.after_results}"),
        *([("because", report.locality_reason)] if report.locality_reason else []),
    ]
    lines = [f"{name:<26}{value}" for name, value in rows]
    lines += ["", "conversation              append"]
    lines += [
        f"{shape.name:<26}{'exact' if shape.exact else 'refused: ' + shape.reason}" for shape in report.shapes
    ]
    return "\n".join(lines)


def _quoted(text: str | None) -> str:
    return "-" if text is None else repr(text)
