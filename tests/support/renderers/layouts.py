"""What vLLM's renderers make of a conversation, as pieces of text and markers: small re-implementations.

A marker is a special token; a renderer that encodes a text in one pass finds the same ones, as long as no
message spells one. tests/campaign/renderers compares each layout with the engine's own renderer.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Message = dict[str, Any]
Pieces = list[str]


class Marker(str):
    """A special token, by its text."""

    __slots__ = ()


class Unrenderable(ValueError):
    """The renderer refuses the conversation; the text begins as the engine's does."""


Layout = Callable[[Sequence[Message], Sequence[Message], Mapping[str, Any]], Pieces]
"""From messages, declared tools and template arguments, with `add_generation_prompt` among them."""


def text_of(content: Any, between: str = "\n\n") -> str:
    """The text of a message's content, which may be parts."""
    return between.join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _reasoning(message: Message) -> str:
    """In either spelling. DeepSeek's renderers read `reasoning` alone."""
    return message.get("reasoning") or message.get("reasoning_content") or ""


def _calls(message: Message) -> list[tuple[str, str, Any]]:
    """Id, name and arguments of each call."""
    functions = [(call["id"], call["function"]) for call in message.get("tool_calls") or ()]
    return [(name, each["name"], _parsed(each.get("arguments") or "{}")) for name, each in functions]


def _parsed(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _in_order(results: Sequence[Message], calls: Sequence[tuple[str, str, Any]]) -> list[Message]:
    """Tool results in the order of the calls, where both are known."""
    order = {name: index for index, (name, _, _) in enumerate(calls)}
    return sorted(results, key=lambda result: order.get(result.get("tool_call_id", ""), len(order)))


def _grouped(messages: Sequence[Message]) -> Iterator[tuple[str, list[Message]]]:
    """Messages of the same role in a row."""
    group: list[Message] = []
    for message in messages:
        if group and message["role"] != group[0]["role"]:
            yield group[0]["role"], group
            group = []
        group.append(message)
    if group:
        yield group[0]["role"], group


_NO_THINKING = "Think not implemented for tokenizer < V13."
_CALL_ID = re.compile(r"[a-zA-Z0-9]{9}")
_AFTER = {
    "system": {"user", "assistant", "system"},
    "user": {"assistant", "system", "user"},
    "assistant": {"assistant", "user", "tool"},
    "tool": {"assistant", "tool", "user"},
}


def mistral(version: int) -> Layout:
    """`--tokenizer-mode mistral`, for the versions 3, 7, 11 and 13 of its tokenizers."""

    def render(messages: Sequence[Message], tools: Sequence[Message], options: Mapping[str, Any]) -> Pieces:
        messages = [{**each, "role": _as_system(each["role"])} for each in messages]
        continues = bool(options.get("continue_final_message"))
        _check_mistral(messages, version, continues)
        pieces: Pieces = [Marker("<s>")]
        users = [index for index, each in enumerate(messages) if each["role"] == "user"]
        system = "\n\n".join(text_of(each["content"]) for each in messages if each["role"] == "system")
        declared = users[:1] if version >= 13 else users[-1:]
        calls: list[tuple[str, str, Any]] = []
        place = 0
        for role, group in _grouped(messages):
            if role == "user":
                if tools and place <= declared[0] < place + len(group):
                    pieces += [Marker("[AVAILABLE_TOOLS]"), _dumped([_tool(each) for each in tools])]
                    pieces.append(Marker("[/AVAILABLE_TOOLS]"))
                last = place <= users[-1] < place + len(group)
                texts = [system] if system and last and version < 7 else []
                texts += [text for each in group if (text := text_of(each["content"]))]
                pieces += [Marker("[INST]"), "\n\n".join(texts), Marker("[/INST]")]
            elif role == "system" and version >= 7:
                for each in group:
                    pieces += [Marker("[SYSTEM_PROMPT]"), text_of(each["content"]), Marker("[/SYSTEM_PROMPT]")]
            elif role == "assistant":
                calls = [call for each in group for call in _calls(each)]
                pieces += [*_mistral_turn(group, calls, version), Marker("</s>")]
            elif role == "tool":
                if version >= 11 and not {each["tool_call_id"] for each in group} <= {call[0] for call in calls}:
                    raise Unrenderable("Unexpected tool call id")
                for result in _in_order(group, calls) if version >= 11 else group:
                    pieces += _mistral_result(result, version)
            place += len(group)
        return pieces[:-1] if continues else pieces

    return render


def _as_system(role: str) -> str:
    return "system" if role == "developer" else role


def _check_mistral(messages: Sequence[Message], version: int, continues: bool) -> None:
    if messages[-1]["role"] == "assistant" and not continues:
        raise Unrenderable("Cannot set `add_generation_prompt` to True when the last message is from")
    for before, message in zip(messages, messages[1:], strict=False):
        if message["role"] not in _AFTER[before["role"]]:
            raise Unrenderable(f"Unexpected role '{message['role']}' after role '{before['role']}'")
    for message in messages:
        ids = [name for name, _, _ in _calls(message)]
        ids += [message["tool_call_id"]] if message["role"] == "tool" else []
        if version < 13 and _reasoning(message):
            raise Unrenderable(_NO_THINKING if version >= 11 else "Unexpected content chunk types in assistant")
        if version < 13 and not all(map(_CALL_ID.fullmatch, ids)):
            raise Unrenderable("Tool call id was ")
        if version >= 11 and message["role"] == "assistant" and len(set(ids)) < len(ids):
            raise Unrenderable("Duplicate tool call id")
        if message["role"] == "assistant" and version < 7:
            if bool(text_of(message.get("content"))) == bool(message.get("tool_calls")):
                raise Unrenderable("Assistant message must have either content or tool_calls, but not both.")


def _tool(tool: Message) -> Message:
    function = {name: tool["function"].get(name) for name in ("name", "description", "parameters")}
    return {"type": "function", "function": function}


def _mistral_turn(group: Sequence[Message], calls: Sequence[tuple[str, str, Any]], version: int) -> Pieces:
    pieces: Pieces = []
    texts: list[str] = []
    for message in group:
        if thought := _reasoning(message):
            pieces += ["\n\n".join(texts), Marker("[THINK]"), thought, Marker("[/THINK]")]
            texts = []
        texts += [text] if (text := text_of(message.get("content"))) else []
    pieces.append("\n\n".join(texts))
    if calls and version < 11:
        listed = [{"name": name, "arguments": arguments, "id": call} for call, name, arguments in calls]
        return [*pieces, Marker("[TOOL_CALLS]"), _dumped(listed)]
    for call, name, arguments in calls:
        identity = [Marker("[CALL_ID]"), call] if version < 13 else []
        pieces += [Marker("[TOOL_CALLS]"), name, *identity, Marker("[ARGS]"), _dumped(arguments)]
    return pieces


def _mistral_result(result: Message, version: int) -> Pieces:
    text, call = text_of(result["content"]), result["tool_call_id"]
    inner: Pieces = [text] if version >= 13 else [call, Marker("[TOOL_CONTENT]"), text]
    if version < 7:
        try:
            value = json.loads(text or "{}")
        except json.JSONDecodeError:
            value = text
        inner = [_dumped({"content": value, "call_id": call})]
    return [Marker("[TOOL_RESULTS]"), *inner, Marker("[/TOOL_RESULTS]")]


_USER, _ASSISTANT = Marker("<｜User｜>"), Marker("<｜Assistant｜>")
_EOS, _DSML = Marker("<｜end▁of▁sentence｜>"), Marker("｜DSML｜")
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
            shown = value if isinstance(value, str) else _dumped(value)
            pieces += ["\n<" if index else "<", _DSML, f'parameter name="{key}" string="']
            pieces += [f'{"true" if isinstance(value, str) else "false"}">{shown}</', _DSML, "parameter>"]
        pieces += ["\n</", _DSML, "invoke>\n"]
    return [*pieces, "</", _DSML, f"{block}>"] if calls else []


def _declared(tools: Sequence[Message]) -> str:
    """In place of a page of instructions."""
    schemas = "\n".join(_dumped(tool["function"]) for tool in tools)
    return f"\n\n## Tools\n{schemas}\n" if tools else ""


def deepseek_v4(messages: Sequence[Message], tools: Sequence[Message], options: Mapping[str, Any]) -> Pieces:
    """`--tokenizer-mode deepseek_v4`: results are parts of a user's turn; earlier thinking is dropped."""
    effort = options.get("reasoning_effort")
    thinks = _thinks(options, default=True) and effort != "none"
    drops = thinks and bool(options.get("drop_thinking", True)) and not tools
    turns = _merged(messages)
    asked = max((index for index, each in enumerate(turns) if each["role"] in ("user", "developer")), default=-1)
    if drops:
        turns = [each for index, each in enumerate(turns) if each["role"] != "developer" or index >= asked]
        asked = max((i for i, each in enumerate(turns) if each["role"] in ("user", "developer")), default=-1)
    systems = [index for index, each in enumerate(turns) if each["role"] == "system"]
    if tools and not systems:
        turns, asked, systems = [{"role": "system", "content": ""}, *turns], asked + 1, [0]
    pieces: Pieces = [Marker("<｜begin▁of▁sentence｜>")]
    if thinks and effort not in ("low", "minimal", "medium"):
        pieces.append(_EFFORT.format("max" if effort == "max" else "high"))
    for index, turn in enumerate(turns):
        role = turn["role"]
        if role == "assistant":
            if thinks and (not drops or index > asked):
                pieces += [turn.get("reasoning") or "", _END_THINK]
            pieces += [text_of(turn.get("content")), *_dsml(_calls(turn), "tool_calls"), _EOS]
            continue
        text = text_of(turn["content"])
        pieces += [_USER, text] if role != "system" else [text]
        pieces.append(_declared(tools) if systems[:1] == [index] else "")
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
        results = iter(_in_order([each for each in gathered if each["role"] == "tool"], calls))
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
        calls = _calls(message) or calls
        turns.append(message)
    flush()
    return turns


def deepseek_v32(messages: Sequence[Message], tools: Sequence[Message], options: Mapping[str, Any]) -> Pieces:
    """`--tokenizer-mode deepseek_v32`: results are a block of their own, closed after the last one."""
    thinks = _thinks(options, default=False)
    asked = max((i for i, each in enumerate(messages) if each["role"] in ("user", "developer")), default=-1)
    pieces: Pieces = [Marker("<｜begin▁of▁sentence｜>"), _declared(tools)]
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
                if not (message.get("reasoning") or calls):
                    raise Unrenderable("ThinkingMode: thinking, invalid message without reasoning/tool_calls")
                pieces += [message.get("reasoning") or "", _END_THINK]
            pieces += [text, *_dsml(_calls(message), "function_calls"), _EOS]
        else:
            answered += 1
            if answered > calls:
                raise Unrenderable("No tool calls but found tool output")
            pieces.append("\n\n<function_results>" if answered == 1 else "")
            pieces.append(f"\n<result>{text}</result>")
            pieces += ["\n</function_results>\n\n", opening] if answered == calls else []
    return pieces


_INKLING = {"user": "user", "assistant": "model", "system": "system", "developer": "system", "tool": "tool"}
_EFFORTS = {"none": "0.0", "minimal": "0.1", "low": "0.2", "medium": "0.7", "high": "0.9", "xhigh": "0.99"}


def inkling(messages: Sequence[Message], tools: Sequence[Message], options: Mapping[str, Any]) -> Pieces:
    """`--tokenizer-mode inkling`: a turn is several messages; each piece is encoded alone."""

    def block(role: str, kind: str, text: str, author: str = "") -> None:
        pieces.extend([Marker(f"<|message_{_INKLING[role]}|>"), author, Marker(kind), text])
        pieces.append(Marker("<|end_message|>"))

    pieces: Pieces = []
    names: dict[str, str] = {}
    effort = _EFFORTS.get(options.get("reasoning_effort") or "high", "0.99")
    if tools:
        block("system", "<|unused_200024|>", _compact([_inkling_tool(tool) for tool in tools]), "tool_declare")
    unsaid = True
    for message in messages:
        role = message["role"]
        if unsaid and role not in ("system", "developer"):
            block("system", "<|content_text|>", f"Thinking effort level: {effort}")
            unsaid = False
        if role == "tool":
            name = names.get(message["tool_call_id"], "")
            block("tool", "<|content_text|>", text_of(message["content"], ""), name)
            continue
        if role == "assistant" and _reasoning(message):
            block("assistant", "<|content_thinking|>", _reasoning(message))
        content = message.get("content") or []
        for part in [content] if isinstance(content, str) else [part["text"] for part in content]:
            block(role, "<|content_text|>", part)
        for call, name, arguments in _calls(message):
            names[call] = name
            text = f'{{"name":{_dumped(name)},"args":{_compact(arguments)}}}'
            block("assistant", "<|content_invoke_tool_json|>", text, name)
        if role == "assistant":
            pieces.append(Marker("<|content_model_end_sampling|>"))
    return [*pieces, Marker("<|message_model|>")] if options.get("add_generation_prompt", True) else pieces


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def _inkling_tool(tool: Message) -> Message:
    function = tool["function"]
    parameters = function.get("parameters") or {}
    described = {"description": function.get("description") or "", "parameters": parameters}
    return {**described, "name": function["name"], "type": "function"}


def harmony(messages: Sequence[Message], tools: Sequence[Message], options: Mapping[str, Any]) -> Pieces:
    """gpt-oss: a turn is messages on channels; analysis is dropped once a final message follows it."""
    effort = options.get("reasoning_effort") or "medium"
    names = {call: name for message in messages for call, name, _ in _calls(message)}
    blocks = [_said("system", f"You are ChatGPT.\n\nReasoning: {effort}")]
    leads = messages[0]["role"] in ("system", "developer")
    instructions = f"# Instructions\n\n{text_of(messages[0]['content'], '')}" if leads else ""
    if instructions or tools:
        blocks.append(_said("developer", instructions + _declared(tools)))
    final = 0
    for message in messages[1:] if leads else messages:
        role, text = message["role"], text_of(message.get("content"), "")
        analysis = _said("assistant", message.get("reasoning") or "", "analysis")
        if role == "assistant":
            calls = message.get("tool_calls") or []
            said = [_said("assistant", text, "commentary" if calls else "final")] if text else []
            thought = [analysis] if message.get("reasoning") else []
            blocks += [*said, *thought] if calls else [*thought, *said]
            final = len(blocks) - 1 if said and not calls else final
            for function in (call["function"] for call in calls):
                author = f"assistant to=functions.{function['name']}"
                arguments = function["arguments"]
                shown = arguments if isinstance(arguments, str) else _dumped(arguments)
                blocks.append([*_said(author, shown, "commentary json")[:-1], Marker("<|call|>")])
        elif role == "tool":
            author = f"functions.{names.get(message['tool_call_id'], '')}"
            blocks.append(_said(author, text, "commentary to=assistant"))
        else:
            shown = text if role == "user" else f"# Instructions\n\n{text}"
            blocks.append(_said("user" if role == "user" else "developer", shown))
    kept = [each for index, each in enumerate(blocks) if index >= final or "analysis" not in each]
    return [*(piece for block in kept for piece in block), Marker("<|start|>"), "assistant"]


def _said(author: str, text: str, channel: str = "") -> Pieces:
    on = [Marker("<|channel|>"), channel] if channel else []
    return [Marker("<|start|>"), author, *on, Marker("<|message|>"), text, Marker("<|end|>")]


LAYOUTS: dict[str, Layout] = {
    "mistral_v3": mistral(3),
    "mistral_v7": mistral(7),
    "mistral_v11": mistral(11),
    "mistral_v13": mistral(13),
    "deepseek_v32": deepseek_v32,
    "deepseek_v4": deepseek_v4,
    "harmony": harmony,
    "inkling": inkling,
}
"""By the name of the model."""
