"""What vLLM makes of a conversation for DeepSeek V3.2 and V4."""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.renderers.pieces import (
    Marker,
    Message,
    Pieces,
    Unrenderable,
    calls_of,
    declared_text,
    dumped,
    in_order,
    reasoning_of,
    text_of,
)

_USER, _ASSISTANT = Marker("<\uff5cUser\uff5c>"), Marker("<\uff5cAssistant\uff5c>")
_EOS, _DSML = Marker("<\uff5cend▁of▁sentence\uff5c>"), Marker("\uff5cDSML\uff5c")
_THINK, _END_THINK = Marker("<think>"), Marker("</think>")
_LINE = "\n"
_EFFORT = "Reasoning Effort: {}\n\n"


def _thinks(options: Mapping[str, Any], default: bool) -> bool:
    asked = [bool(options[name]) for name in ("thinking", "enable_thinking") if name in options]
    return any(asked) if asked else default


def _dsml(calls: Sequence[tuple[str, str, Any]], block: str) -> Pieces:
    pieces: Pieces = ["\n\n<", _DSML, block, ">\n"] if calls else []
    for _, name, arguments in calls:
        pieces += ["<", _DSML, f'invoke name="{name}">\n']
        for index, (key, value) in enumerate(arguments.items()):
            shown = value if isinstance(value, str) else dumped(value)
            pieces += ["\n<" if index else "<", _DSML, f'parameter name="{key}" string="']
            pieces += [f'{"true" if isinstance(value, str) else "false"}">{shown}</', _DSML, "parameter>"]
        pieces += ["\n</", _DSML, "invoke>\n"]
    return [*pieces, "</", _DSML, f"{block}>"] if calls else []


def deepseek_v4(messages: Sequence[Message], tools: Sequence[Message], options: Mapping[str, Any]) -> Pieces:
    """`--tokenizer-mode deepseek_v4`: results are parts of a user's turn; earlier thinking is dropped."""
    effort = options.get("reasoning_effort")
    thinks = _thinks(options, default=True) and effort != "none"
    drops = thinks and bool(options.get("drop_thinking", True)) and not tools
    turns = _merged(messages)
    asked = max(
        (index for index, each in enumerate(turns) if each["role"] in ("user", "developer")), default=-1
    )
    if drops:
        turns = [each for index, each in enumerate(turns) if each["role"] != "developer" or index >= asked]
        asked = max((i for i, each in enumerate(turns) if each["role"] in ("user", "developer")), default=-1)
    systems = [index for index, each in enumerate(turns) if each["role"] == "system"]
    if tools and not systems:
        turns, asked, systems = [{"role": "system", "content": ""}, *turns], asked + 1, [0]
    pieces: Pieces = [Marker("<\uff5cbegin▁of▁sentence\uff5c>")]
    if thinks and effort not in ("low", "minimal", "medium"):
        pieces.append(_EFFORT.format("max" if effort == "max" else "high"))
    for index, turn in enumerate(turns):
        role = turn["role"]
        if role == "assistant":
            if thinks and (not drops or index > asked):
                pieces += [reasoning_of(turn), _END_THINK]
            pieces += [text_of(turn.get("content")), *_dsml(calls_of(turn), "tool_calls"), _EOS]
            continue
        text = text_of(turn["content"])
        pieces += [_USER, text] if role != "system" else [text]
        pieces.append(declared_text(tools) if systems[:1] == [index] else "")
        following = turns[index + 1]["role"] if index + 1 < len(turns) else "assistant"
        if following == "assistant":
            opens = thinks and (not drops or index >= asked)
            pieces += [_ASSISTANT, _THINK if opens else _END_THINK]
    return pieces


def _merged(messages: Sequence[Message]) -> list[Message]:
    """DeepSeek V4's turns: users and tool results in a row are one user's turn."""
    turns: list[Message] = []
    calls: list[tuple[str, str, Any]] = []
    gathered: list[Message] = []

    def flush() -> None:
        results = iter(in_order([each for each in gathered if each["role"] == "tool"], calls))
        texts = [
            f"<tool_result>{text_of(next(results)['content'], _LINE)}</tool_result>"
            if each["role"] == "tool"
            else text_of(each["content"])
            for each in gathered
        ]
        if texts:
            turns.append({"role": "user", "content": "\n\n".join(texts)})
        gathered.clear()

    for message in messages:
        if message["role"] in ("user", "tool"):
            gathered.append(message)
            continue
        flush()
        calls = calls_of(message) or calls
        turns.append(message)
    flush()
    return turns


def deepseek_v32(messages: Sequence[Message], tools: Sequence[Message], options: Mapping[str, Any]) -> Pieces:
    """`--tokenizer-mode deepseek_v32`: results are a block of their own, closed after the last one."""
    thinks = _thinks(options, default=False)
    asked = max((i for i, each in enumerate(messages) if each["role"] in ("user", "developer")), default=-1)
    pieces: Pieces = [Marker("<\uff5cbegin▁of▁sentence\uff5c>"), declared_text(tools)]
    if thinks and messages[-1]["role"] == "user" and "developer" in [each["role"] for each in messages]:
        raise Unrenderable("Index ")
    calls, answered = 0, 0
    for index, message in enumerate(messages):
        role, text = message["role"], text_of(message.get("content"), "\n")
        opening = _THINK if thinks and index >= asked else _END_THINK
        if role in ("user", "developer"):
            said = text if role == "user" else f"\n\n# The user's message is: {text}"
            pieces += [_USER, said, _ASSISTANT, _THINK if thinks and index == asked else _END_THINK]
        elif role == "system":
            pieces.append(text)
        elif role == "assistant":
            calls, answered = len(message.get("tool_calls") or ()), 0
            if thinks and index > asked:
                if not (reasoning_of(message) or calls):
                    raise Unrenderable("ThinkingMode: thinking, invalid message without reasoning/tool_calls")
                pieces += [reasoning_of(message), _END_THINK]
            pieces += [text, *_dsml(calls_of(message), "function_calls"), _EOS]
        else:
            answered += 1
            if answered > calls:
                raise Unrenderable("No tool calls but found tool output")
            pieces.append("\n\n<function_results>" if answered == 1 else "")
            pieces.append(f"\n<result>{text}</result>")
            pieces += ["\n</function_results>\n\n", opening] if answered == calls else []
    return pieces
