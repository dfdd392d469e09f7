"""The turns that models without a template sample, as pieces, and their ids in a spelling of their own.

Each is what the model's documents and vLLM's parser for it expect. What vLLM renders for the same turn later
differs in places: the white space of arguments, indices of calls, thinking that is left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.renderers.pieces import Marker, Pieces, dumped
from tests.support.renderers.stand_in import ids_of

Call = tuple[str, dict[str, Any]]
"""Name and arguments."""


@dataclass(frozen=True)
class Said:
    """What a turn says."""

    text: str = ""
    calls: Sequence[Call] = ()
    thought: str = ""
    thinks: bool = False
    """Whether the prompt has opened the turn's thinking, where models have a mark for that."""
    earlier: int = 0
    """How many calls are in the conversation already."""


def _mistral(version: int) -> Callable[[Said], Pieces]:
    def turn(said: Said) -> Pieces:
        pieces: Pieces = [Marker("[THINK]"), said.thought, Marker("[/THINK]")] if said.thought else []
        pieces.append(said.text)
        if said.calls and version < 11:
            listed = [{"name": name, "arguments": arguments} for name, arguments in said.calls]
            pieces += [Marker("[TOOL_CALLS]"), dumped(listed)]
        for name, arguments in said.calls if version >= 11 else ():
            pieces += [Marker("[TOOL_CALLS]"), name, Marker("[ARGS]"), dumped(arguments)]
        return [*pieces, Marker("</s>")]

    return turn


def _deepseek(block: str, space: str = "") -> Callable[[Said], Pieces]:
    dsml = Marker("\uff5cDSML\uff5c")

    def turn(said: Said) -> Pieces:
        pieces: Pieces = [said.thought, Marker("</think>")] if said.thinks else []
        pieces += [said.text, *(["\n\n<", dsml, f"{block}>\n"] if said.calls else [])]
        for name, arguments in said.calls:
            pieces += ["<", dsml, f'{space}invoke name="{name}">\n']
            for key, value in arguments.items():
                pieces += ["<", dsml, f'{space}parameter name="{key}" string="true">{value}']
                pieces += ["</", dsml, f"{space}parameter>\n"]
            pieces += ["</", dsml, f"{space}invoke>\n"]
        pieces += ["</", dsml, f"{block}>"] if said.calls else []
        return [*pieces, Marker("<\uff5cend▁of▁sentence\uff5c>")]

    return turn


def _harmony(said: Said) -> Pieces:
    channel, message = Marker("<|channel|>"), Marker("<|message|>")
    again: Pieces = [Marker("<|end|>"), Marker("<|start|>"), "assistant"]
    pieces: Pieces = [channel, "analysis", message, said.thought, *again] if said.thought else []
    if not said.calls:
        return [*pieces, channel, "final", message, said.text, Marker("<|return|>")]
    pieces += [channel, "commentary", message, said.text, *again] if said.text else []
    ((name, arguments),) = said.calls  # <|call|> ends the turn
    header = [channel, f"commentary to=functions.{name} ", Marker("<|constrain|>"), "json", message]
    return [*pieces, *header, dumped(arguments), Marker("<|call|>")]


def _inkling(said: Said) -> Pieces:
    blocks = [("", "thinking", said.thought)] if said.thought else []
    blocks += [("", "text", said.text)] if said.text else []
    for name, arguments in said.calls:
        blocks.append((name, "invoke_tool_json", dumped({"name": name, "args": arguments})))
    pieces: Pieces = []
    for author, kind, text in blocks:
        opening = [Marker("<|message_model|>")] if pieces else []
        pieces += [*opening, author, Marker(f"<|content_{kind}|>"), text, Marker("<|end_message|>")]
    return [*pieces, Marker("<|content_model_end_sampling|>")]


def _cohere(said: Said) -> Pieces:
    listed = [
        {"tool_call_id": str(index), "tool_name": name, "parameters": arguments}
        for index, (name, arguments) in enumerate(said.calls, said.earlier)
    ]
    blocks = {"THINKING": said.thought, "TEXT": said.text, "ACTION": dumped(listed) if listed else ""}
    pieces: Pieces = []
    for kind, text in blocks.items():
        pieces += [Marker(f"<|START_{kind}|>"), text, Marker(f"<|END_{kind}|>")] if text else []
    return [*pieces, Marker("<|END_OF_TURN_TOKEN|>")]


TURNS: dict[str, Callable[[Said], Pieces]] = {
    "mistral_v3": _mistral(3),
    "mistral_v7": _mistral(7),
    "mistral_v11": _mistral(11),
    "mistral_v13": _mistral(13),
    "deepseek_v32": _deepseek("function_calls"),
    "deepseek_v4": _deepseek("tool_calls"),
    "deepseek_v41": _deepseek(" calls", " "),
    "harmony": _harmony,
    "inkling": _inkling,
    "cohere": _cohere,
}
"""By the name of the model."""


def spelled(pieces: Pieces, tokenizer: Any) -> list[int]:
    """The ids of a turn with its texts spelled letter by letter, as no tokenizer does."""
    vocabulary = tokenizer.get_vocab()

    def spell(text: str) -> list[int]:
        if "<0x0A>" in vocabulary:
            return [vocabulary[f"<0x{byte:02X}>"] for byte in text.encode()]
        return [token for letter in text for token in tokenizer.encode(letter, add_special_tokens=False)]

    return ids_of(pieces, vocabulary.__getitem__, spell)
