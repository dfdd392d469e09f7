"""What is found out about a template: how turns close, what stands between them, what can be appended."""

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
_SPECIAL = re.compile(
    r"<[|\uff5c][^<>|\uff5c\s]+[|\uff5c]>|<\|?[a-z_\"]+\|>|<\|[a-z_\"]+>|</?[a-z][a-z_]*>|</s>|<s>|\[/?[A-Z_]{3,}\]"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape of conversation."""

    name: str
    exact: bool
    reason: str
    """Why it is refused; empty where it is exact."""


@dataclass(frozen=True, slots=True)
class Report:
    """What is known of a template."""

    source: str
    close: str | None
    """Text with which a turn that is only text is closed; None if it prints no such turn."""
    tool_close: str | None
    """The same for a turn that calls a tool; None if the template takes no tool calls."""
    stop_tokens: list[str]
    """Tokens that end a turn, as far as the template shows them."""
    opening_stops: list[str]
    """Tokens put right behind a turn that has no close: they may end it and open the next."""
    before_user: str | None
    """Text between a closed turn and the text of a user message."""
    after_user: str | None
    """Text between that and what the model writes next."""
    append_only: bool
    """Whether what was rendered of a history stays as it is when messages follow."""
    thinking_stripped: bool | None
    """Whether reasoning disappears from a turn when a user message follows; None if it is never printed."""
    shapes: list[Shape]

    @property
    def exact(self) -> bool:
        """Whether every shape is exact."""
        return all(shape.exact for shape in self.shapes)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-like values."""
        return asdict(self)


def load_for_check(source: str) -> ChatTokenizer:
    """A tokenizer for a model, or for a template file alone.

    A file brings no vocabulary, so one of bytes stands in, with what looks like special tokens in the
    template.

    Raises:
        TokenizerUnavailable: neither a template file nor a loadable model.
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
    found = sorted({*_SPECIAL.findall(text), "<|bos|>", "<|eos|>"})
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in found])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|bos|>", eos_token="<|eos|>")
    tokenizer.chat_template = text
    return ChatTokenizer(source, len(tokenizer), tokenizer, backend.to_str())


def check(tokenizer: ChatTokenizer) -> Report:
    """Examine a template. Never raises for what a template cannot do: that is the report."""
    turn = {"role": "assistant", "content": "Sunny."}
    said = _ending(tokenizer, [_USER, turn], [_NEXT], None)
    called = _ending(tokenizer, [_USER, _calling(1)], _results(1), _TOOLS)
    endings = [ending for ending in (said, called) if ending is not None]
    before, after = _around(said, str(_NEXT["content"]))
    return Report(
        source=tokenizer.source,
        close=said.close if said else None,
        tool_close=called.close if called else None,
        stop_tokens=list(dict.fromkeys(stop for ending in endings for stop in ending.stops)),
        opening_stops=list(dict.fromkeys(ending.opening for ending in endings if ending.opening)),
        before_user=before,
        after_user=after,
        append_only=_append_only(tokenizer, [_USER, turn], [_NEXT]),
        thinking_stripped=_thinking_stripped(tokenizer),
        shapes=[_try(tokenizer, name, *case) for name, case in _shapes().items()],
    )


def _shapes() -> dict[str, tuple[list[Message], list[Message], list[dict[str, Any]] | None]]:
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
        "tool call, result": ([_USER, _calling(1)], _results(1), _TOOLS),
        "parallel calls, results": ([_USER, _calling(2)], _results(2), _TOOLS),
        "tool call, result, user": ([_USER, _calling(1)], [*_results(1), _NEXT], _TOOLS),
    }


def _try(
    tokenizer: ChatTokenizer,
    name: str,
    history: list[Message],
    new: list[Message],
    tools: list[dict[str, Any]] | None,
) -> Shape:
    try:
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


def _around(ending: Ending | None, content: str) -> tuple[str | None, str | None]:
    if ending is None or content not in ending.behind:
        return None, None
    before, _, after = ending.behind.partition(content)
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


def _calling(count: int) -> dict[str, Any]:
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
    """The report for a person."""
    rows: Sequence[tuple[str, object]] = [
        ("template", report.source),
        ("closes a turn with", _shown(report.close)),
        ("closes a tool call with", _shown(report.tool_close)),
        ("stop tokens", ", ".join(report.stop_tokens) or "none of its own"),
        ("stops that open the next", ", ".join(report.opening_stops) or "none"),
        ("before user text", _shown(report.before_user)),
        ("behind user text", _shown(report.after_user)),
        ("history is append-only", "yes" if report.append_only else "no"),
        (
            "thinking stripped",
            {True: "yes", False: "no", None: "never printed"}[report.thinking_stripped],
        ),
    ]
    lines = [f"{name:<26}{value}" for name, value in rows]
    lines += ["", "conversation              append"]
    lines += [
        f"{shape.name:<26}{'exact' if shape.exact else 'refused: ' + shape.reason}" for shape in report.shapes
    ]
    return "\n".join(lines)


def _shown(text: str | None) -> str:
    return "-" if text is None else repr(text)
