"""What vLLM's renderers make of a conversation, as pieces of text and markers: small re-implementations.

A marker is a special token; a renderer that encodes a text in one pass finds the same ones, as long as no
message spells one. tests/campaign/renderers compares each layout with the engine's own renderer.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.renderers.deepseek import deepseek_v4, deepseek_v32
from tests.support.renderers.kimi import kimi_k3
from tests.support.renderers.mistral import mistral
from tests.support.renderers.pieces import (
    CUT,
    Layout,
    Marker,
    Message,
    Pieces,
    calls_of,
    declared_text,
    dumped,
    reasoning_of,
    text_of,
)

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
        block(
            "system", "<|unused_200024|>", _compact([_inkling_tool(tool) for tool in tools]), "tool_declare"
        )
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
        if role == "assistant" and reasoning_of(message):
            block("assistant", "<|content_thinking|>", reasoning_of(message))
        content = message.get("content") or []
        for part in [content] if isinstance(content, str) else [part["text"] for part in content]:
            block(role, "<|content_text|>", part)
        for call, name, arguments in calls_of(message):
            names[call] = name
            text = f'{{"name":{dumped(name)},"args":{_compact(arguments)}}}'
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
    names = {call: name for message in messages for call, name, _ in calls_of(message)}
    blocks = [_said("system", f"You are ChatGPT.\n\nReasoning: {effort}")]
    leads = messages[0]["role"] in ("system", "developer")
    instructions = f"# Instructions\n\n{text_of(messages[0]['content'], '')}" if leads else ""
    if instructions or tools:
        blocks.append(_said("developer", instructions + declared_text(tools)))
    final = 0
    for message in messages[1:] if leads else messages:
        role, text = message["role"], text_of(message.get("content"), "")
        if role == "assistant":
            calls = message.get("tool_calls") or []
            spoken = (
                _said("assistant", text, "commentary")
                if calls
                else _said("assistant", message["content"], "final")
            )
            said = [spoken] if text else []
            thought = (
                [_said("assistant", reasoning, "analysis")] if (reasoning := reasoning_of(message)) else []
            )
            blocks += [*said, *thought] if calls else [*thought, *said]
            final = len(blocks) - 1 if said and not calls else final
            for function in (call["function"] for call in calls):
                author = f"assistant to=functions.{function['name']}"
                arguments = function["arguments"]
                shown = arguments if isinstance(arguments, str) else dumped(arguments)
                blocks.append([*_said(author, shown, "commentary json")[:-1], Marker("<|call|>")])
        elif role == "tool":
            author = f"functions.{names.get(message['tool_call_id'], '')}"
            blocks.append(_said(author, text, "commentary to=assistant"))
        else:
            said_by_user = role == "user"
            shown = message["content"] if said_by_user else f"# Instructions\n\n{text}"
            blocks.append(_said("user" if said_by_user else "developer", shown))
    kept = [each for index, each in enumerate(blocks) if index >= final or "analysis" not in each]
    return [*(piece for block in kept for piece in block), Marker("<|start|>"), "assistant"]


def _said(author: str, content: Any, channel: str = "") -> Pieces:
    on = [Marker("<|channel|>"), channel] if channel else []
    texts = (
        [content] if isinstance(content, str) else [each for part in content for each in (part["text"], CUT)]
    )
    return [Marker("<|start|>"), author, *on, Marker("<|message|>"), *texts, Marker("<|end|>")]


LAYOUTS: dict[str, Layout] = {
    "mistral_v3": mistral(3),
    "mistral_v7": mistral(7),
    "mistral_v11": mistral(11),
    "mistral_v13": mistral(13),
    "deepseek_v32": deepseek_v32,
    "deepseek_v4": deepseek_v4,
    "harmony": harmony,
    "inkling": inkling,
    "kimi_k3": kimi_k3,
}
"""By the name of the model."""
