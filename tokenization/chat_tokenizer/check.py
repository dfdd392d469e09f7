"""Examines a chat template: how it closes turns, what it prints between them, and which appends are exact."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chat_tokenizer.append import Appended
from chat_tokenizer.chat import ChatTokenizer
from chat_tokenizer.encoder import Encoder
from chat_tokenizer.errors import TokenizationError
from chat_tokenizer.histories import ANY_TOOLS, Messages, assistant, call, result, user
from chat_tokenizer.messages import Tools
from chat_tokenizer.turns import MARK

_USER, _NEXT, _TURN = user("What is the weather in Paris?"), user("And in Rome?"), assistant("Sunny.")
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
    renderer: str
    """`template`, or `engine` if a running engine renders."""
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
    """Which messages determine the text after a turn if a user message follows: see `proof`."""
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
    return ChatTokenizer(source, len(tokenizer), tokenizer, Encoder(backend.to_str()))


def check(tokenizer: ChatTokenizer) -> Report:
    """Examine a template. Refusals of the template are part of the report, not raised."""
    proof = tokenizer.prove()
    results = {name: _append(tokenizer, *each) for name, each in _conversations().items()}
    content, called = (
        each if isinstance(each, Appended) else None
        for each in (results["content, user"], results["tool call, result"])
    )
    printed = [each for each in (content, called) if each is not None]
    stops = [token for each in printed for token in each.close_ids[-1:]]
    first = [token for each in printed if not each.close_ids for token in each.suffix_ids[:1]]
    openings = [token for token in first if token in tokenizer.special_ids]
    before, found, after = tokenizer.decode(content.suffix_ids if content else []).partition(_NEXT["content"])
    return Report(
        source=tokenizer.source,
        renderer="engine" if tokenizer.engine_renders else "template",
        close=tokenizer.decode(content.close_ids) if content else None,
        tool_close=tokenizer.decode(called.close_ids) if called else None,
        stop_tokens=[tokenizer.decode([token]) for token in dict.fromkeys(stops)],
        opening_stops=[tokenizer.decode([token]) for token in dict.fromkeys(openings)],
        before_user=before if found else None,
        after_user=after if found else None,
        append_only=_append_only(tokenizer, [_USER, _TURN], [_NEXT]),
        thinking_stripped=_thinking_stripped(tokenizer),
        after_messages=str(proof.after_messages),
        after_results=str(proof.after_results),
        locality_reason=proof.reason,
        shapes=[
            Shape(name, isinstance(each, Appended), "" if isinstance(each, Appended) else str(each))
            for name, each in results.items()
        ],
    )


def _conversations() -> dict[str, tuple[Messages, Messages, Tools | None]]:
    """Conversations by name of their shape: history, new messages, tools."""
    system = {"role": "system", "content": "You are brief."}
    thinking = assistant("Sunny.", reasoning_content="Let me see.")
    parts = user([{"type": "text", "text": "And in"}, {"type": "text", "text": "Rome?"}])
    called, called_twice = assistant("", tool_calls=[call()]), assistant("", tool_calls=[call(), call(1)])
    results = [result(index, "17 °C", name="alpha") for index in range(2)]
    return {
        "content, user": ([_USER, _TURN], [_NEXT], None),
        "system, content, user": ([system, _USER, _TURN], [_NEXT], None),
        "reasoning, user": ([_USER, thinking], [_NEXT], None),
        "list content": ([_USER, _TURN], [parts], None),
        "tool call, result": ([_USER, called], results[:1], ANY_TOOLS),
        "parallel calls, results": ([_USER, called_twice], results, ANY_TOOLS),
        "tool call, result, user": ([_USER, called], [*results[:1], _NEXT], ANY_TOOLS),
    }


def _append(
    tokenizer: ChatTokenizer, history: Messages, new: Messages, tools: Tools | None
) -> Appended | TokenizationError:
    """What is appended to a turn that was cut off, so with all of its close; or why nothing is."""
    sampled = [tokenizer.vocab_size]  # it has no text, which would have to be the end of the turn's
    try:
        return tokenizer.append(sampled, new, history=history, tools=tools, finish_reason="length")
    except TokenizationError as error:
        return error


def _append_only(tokenizer: ChatTokenizer, history: Messages, new: Messages) -> bool:
    try:
        before = tokenizer.text(history, add_generation_prompt=False)
        return tokenizer.text([*history, *new]).startswith(before)
    except TokenizationError:
        return False


def _thinking_stripped(tokenizer: ChatTokenizer) -> bool | None:
    turn = {**_TURN, "reasoning_content": MARK}
    try:
        if MARK not in tokenizer.text([_USER, turn], add_generation_prompt=False):
            return None
        return MARK not in tokenizer.text([_USER, turn, _NEXT])
    except TokenizationError:
        return None


def table(report: Report) -> str:
    """The report as a text table."""
    rows: Sequence[tuple[str, object]] = [
        (report.renderer, report.source),
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
