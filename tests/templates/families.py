# ruff: noqa: RUF001 - DeepSeek spells its tokens with full-width bars
"""The real chat templates under test and the models they belong to, as data.

The templates are in the package `trl`, which has copies from model repositories. It has no tokenizers, so
this module declares the parts of each model's tokenizer that matter: special tokens, added tokens that are
not special, the end-of-sequence token, and how turns end.

`Close` declares how a turn ends. Most templates close a turn with the token that the model samples. There are
two exceptions: the model samples another token than the history shows (GPT-OSS); or the stop token is the
token that opens the next message, and the rendering has it only once (GLM, tool calls of Gemma 4).
"""

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Close:
    """The end of an assistant turn."""

    shown: str
    """Text that the template prints after the turn; empty if the opener of the next message ends the turn."""
    sampled: str = ""
    """The token that the model samples there, if it differs from `shown`."""
    openers: Mapping[str, str] = field(default_factory=dict)
    """If `shown` is empty: the stop token that opens the next message, by the role of that message."""

    def stop(self, next_role: str) -> str:
        """The text that the model samples at the end of a turn, before a message of role `next_role`."""
        return self.sampled or self.shown or self.openers[next_role]


@dataclass(frozen=True)
class Family:
    """Models whose templates and tokenizers follow one format. Lists are separated by spaces."""

    name: str
    templates: str
    special: str
    """Tokens that decoding with `skip_special_tokens` leaves out."""
    close: Close
    """How a turn without tool calls ends."""
    eos: str
    call_close: Close | None = None
    """How a turn with tool calls ends, if it ends differently."""
    call_close_with: Mapping[str, Close] = field(default_factory=dict)
    """How a turn with tool calls ends if a template argument of this name is set."""
    bos: str | None = None
    plain: str = ""
    """Added tokens that are not special."""
    rstrip: str = ""
    """Tokens that absorb the white space after them."""
    alternate: str | None = None
    """Another stop token that the model may sample instead of its own."""

    def close_of(self, kind: str, template_kwargs: Mapping[str, Any]) -> Close:
        """How a turn of the kind `content` or `call` ends."""
        if kind == "content":
            return self.close
        for name, close in self.call_close_with.items():
            if name in template_kwargs:
                return close
        return self.call_close or self.close


@dataclass(frozen=True)
class Template:
    """A chat template, and the form of messages that it takes."""

    name: str
    family: Family
    takes_parts: bool
    """Takes content as a list of parts, not as text. vLLM decides this from the template's source."""
    takes_argument_text: bool
    """Takes arguments of tool calls as JSON text: the template concatenates them with strings."""

    @cached_property
    def source(self) -> str:
        return template_files()[self.name].read_text("utf-8")


_CHATML = Close("<|im_end|>")
_QWEN = "<|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|image_pad|>"
_TOOLS_AND_THINK = "<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>"
_LLAMA3 = "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>"
_GEMMA4 = (
    "<bos> <eos> <|turn> <turn|> <|channel> <channel|> <|think|> <|tool> <tool|> <|tool_call> <tool_call|> "
    '<|tool_response> <tool_response|> <|"|> <|image|>'
)

FAMILIES = (
    Family(
        "Qwen 2.5",
        "qwen2_5 qwen2_5_vl",
        special=_QWEN,
        plain="<tool_call> </tool_call>",
        close=_CHATML,
        eos="<|im_end|>",
        alternate="<|endoftext|>",
    ),
    Family(
        "Qwen 3",
        "qwen3 qwen3_instruct_2507 qwen3_vl",
        special=_QWEN,
        plain=_TOOLS_AND_THINK,
        close=_CHATML,
        eos="<|im_end|>",
        alternate="<|endoftext|>",
    ),
    Family(
        "Qwen 3.5 to 3.8",
        "qwen3_5_nothink qwen3_5_think qwen3_6 qwen3_8",
        special=_QWEN,
        plain=_TOOLS_AND_THINK,
        close=_CHATML,
        eos="<|im_end|>",
        alternate="<|endoftext|>",
    ),
    Family(
        "Nemotron 3",
        "nemotron_3_nano nemotron_3_super nemotron_3_ultra nemotron_3_5_lightning",
        special="<s> </s> <|im_start|> <|im_end|>",
        plain=_TOOLS_AND_THINK,
        close=_CHATML,
        eos="<|im_end|>",
        bos="<s>",
        alternate="</s>",
    ),
    Family(
        "LFM2",
        "lfm2 lfm2_v2 lfm2_2_5 lfm2_2_5_v2 lfm2_2_5_vl",
        special="<|startoftext|> <|endoftext|> <|im_start|> <|im_end|> <|tool_list_start|> <|tool_list_end|> "
        "<|tool_call_start|> <|tool_call_end|> <|tool_response_start|> <|tool_response_end|>",
        plain="<think> </think>",
        close=_CHATML,
        eos="<|im_end|>",
        bos="<|startoftext|>",
        alternate="<|endoftext|>",
    ),
    Family(
        "Llama 3",
        "llama3",
        special=_LLAMA3,
        close=Close("<|eot_id|>"),
        # as in the first checkpoints, where the token that closes a turn is not the EOS
        eos="<|end_of_text|>",
        bos="<|begin_of_text|>",
        alternate="<|end_of_text|>",
    ),
    Family(
        "Llama 3.1, 3.2",
        "llama3_1 llama3_2",
        special=f"{_LLAMA3} <|eom_id|> <|python_tag|>",
        close=Close("<|eot_id|>"),
        call_close_with={"builtin_tools": Close("<|eom_id|>")},
        eos="<|eot_id|>",
        bos="<|begin_of_text|>",
        alternate="<|end_of_text|>",
    ),
    Family(
        "DeepSeek",
        "deepseekv3 deepseek_r1_distill",
        special="<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜▁pad▁｜> <|EOT|>",
        plain="<｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> "
        "<｜tool▁call▁end｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> "
        "<｜tool▁output▁end｜> <｜tool▁sep｜> <think> </think>",
        close=Close("<｜end▁of▁sentence｜>"),
        eos="<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
        alternate="<|EOT|>",
    ),
    Family(
        "GLM 4",
        "glm4moe",
        special="<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>",
        plain=f"{_TOOLS_AND_THINK} <arg_key> </arg_key> <arg_value> </arg_value> /nothink",
        close=Close("", openers={"user": "<|user|>", "tool": "<|observation|>"}),
        eos="<|endoftext|>",
        alternate="<|endoftext|>",
    ),
    Family(
        "GPT-OSS",
        "gptoss",
        special="<|startoftext|> <|endoftext|> <|return|> <|constrain|> <|channel|> <|start|> <|end|> "
        "<|message|> <|call|>",
        close=Close("<|end|>", sampled="<|return|>"),
        call_close=Close("<|call|>"),
        eos="<|return|>",
        bos="<|startoftext|>",
        alternate="<|endoftext|>",
    ),
    Family(
        "Gemma 1 to 3",
        "gemma gemma3",
        special="<bos> <eos> <start_of_turn> <end_of_turn> <start_of_image>",
        close=Close("<end_of_turn>"),
        eos="<eos>",
        bos="<bos>",
        alternate="<eos>",
    ),
    Family(
        "Gemma 4",
        "gemma4 gemma4_v3 gemma4_v4 gemma4_v5 diffusion_gemma",
        special=_GEMMA4,
        close=Close("<turn|>"),
        call_close=Close("", openers={"tool": "<|tool_response>"}),
        eos="<eos>",
        bos="<bos>",
        alternate="<eos>",
    ),
    Family(
        # the first template prints tool results as separate messages, so a call has a close like any turn
        "Gemma 4, first release",
        "gemma4_v2",
        special=_GEMMA4,
        close=Close("<turn|>"),
        eos="<eos>",
        bos="<bos>",
        alternate="<eos>",
    ),
    Family(
        "Cohere",
        "cohere",
        special="<BOS_TOKEN> <EOS_TOKEN> <|END_OF_TURN_TOKEN|>",
        plain="<|START_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|>",
        close=Close("<|END_OF_TURN_TOKEN|>"),
        eos="<|END_OF_TURN_TOKEN|>",
        bos="<BOS_TOKEN>",
        alternate="<EOS_TOKEN>",
    ),
    Family(
        "Cohere 2",
        "cohere2",
        special="<BOS_TOKEN> <EOS_TOKEN> <|END_OF_TURN_TOKEN|>",
        plain="<|START_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|> <|START_RESPONSE|> "
        "<|END_RESPONSE|>",
        close=Close("<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
        eos="<|END_OF_TURN_TOKEN|>",
        bos="<BOS_TOKEN>",
        alternate="<EOS_TOKEN>",
    ),
    Family(
        "Phi 3",
        "phi3 phi3_5",
        special="<s> </s> <|endoftext|> <|system|> <|user|> <|assistant|> <|end|>",
        rstrip="</s> <|system|> <|user|> <|assistant|> <|end|>",
        close=Close("<|end|>"),
        eos="<|endoftext|>",
        bos="<s>",
        alternate="<|endoftext|>",
    ),
    Family(
        "Muse Glimmer",
        "muse_glimmer",
        special="<|begin_of_text|> <|end_of_text|> <|start|> <|message|> <|eot|> <|eom|>",
        close=Close("<|eot|>"),
        eos="<|eot|>",
        bos="<|begin_of_text|>",
        alternate="<|end_of_text|>",
    ),
    Family(
        "Idefics 3, SmolVLM",
        "idefics3 smolvlm",
        special="<|begin_of_text|> <|end_of_text|> <|im_start|> <end_of_utterance> <image> "
        "<fake_token_around_image>",
        close=Close("<end_of_utterance>"),
        eos="<end_of_utterance>",
        alternate="<|end_of_text|>",
    ),
    Family(
        "LLaVA-NeXT",
        "llava_next",
        special="<unk> <s> </s> <image> <pad>",
        close=Close("</s>"),
        eos="</s>",
        bos="<s>",
    ),
)

_TAKES_PARTS = (
    "diffusion_gemma gemma3 gemma4 gemma4_v2 gemma4_v3 gemma4_v4 gemma4_v5 glm4moe idefics3 lfm2_2_5 "
    "lfm2_2_5_v2 lfm2_2_5_vl llava_next muse_glimmer qwen2_5_vl qwen3_5_nothink qwen3_5_think qwen3_6 "
    "qwen3_8 qwen3_vl smolvlm"
)
"""Templates with `takes_parts`: vLLM 0.32 finds a loop over a message's content in their source."""

_TAKES_ARGUMENT_TEXT = "deepseekv3 deepseek_r1_distill"

TEMPLATES = {
    name: Template(name, family, name in _TAKES_PARTS.split(), name in _TAKES_ARGUMENT_TEXT.split())
    for family in FAMILIES
    for name in family.templates.split()
}

KWARGS: dict[str, dict[str, Any]] = {
    "none": {},
    "add_generation_prompt=False": {"add_generation_prompt": False},
    "enable_thinking=False": {"enable_thinking": False},
    "enable_thinking=True": {"enable_thinking": True},
    "preserve_thinking=True": {"preserve_thinking": True},
    "truncate_history_thinking=False": {"truncate_history_thinking": False},
    "low_effort=True": {"low_effort": True},
    "medium_effort=True": {"medium_effort": True},
    "reasoning_effort=low": {"reasoning_effort": "low"},
    "reasoning_strength=low": {"reasoning_strength": "low"},
    "builtin_tools": {"builtin_tools": ["python"]},
    "tools_in_user_message=False": {"tools_in_user_message": False},
    "date_string": {"date_string": "1 Jan 2025"},
}
"""Template arguments by name. Each is tried with the templates whose source contains it."""


def kwargs_of(template: Template) -> dict[str, dict[str, Any]]:
    """The template arguments to try with a template, by name."""
    return {name: kwargs for name, kwargs in KWARGS.items() if all(key in template.source for key in kwargs)}


def template_files() -> dict[str, Path]:
    """The template files of the package `trl` by name. The package is not imported: it would import torch."""
    files = importlib.metadata.files("trl") or []
    paths = (Path(str(file.locate())) for file in files if file.match("trl/chat_templates/*.jinja"))
    return {path.stem: path for path in paths if not path.stem.endswith("_training")}
