# ruff: noqa: RUF001 - DeepSeek spells its tokens with full-width bars
"""The chat templates in the package `trl` and the models they belong to, as data.

The package has copies from model repositories, and no tokenizers. So this module declares the parts of each
model's tokenizer that matter: special tokens, added tokens that are not special, and the EOS token.
"""

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Family:
    """Models whose templates and tokenizers follow one format. Lists are separated by spaces."""

    name: str
    templates: str
    special: str
    """Tokens that decoding with `skip_special_tokens` leaves out."""
    eos: str
    bos: str | None = None
    plain: str = ""
    """Added tokens that are not special."""
    alternate: str | None = "<|endoftext|>"
    """Another stop token that the model may sample instead of its own."""
    rstrip: str = ""
    """Tokens that absorb the white space after them."""


_QWEN = "<|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|image_pad|>"
_TOOLS_AND_THINK = "<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>"
_LLAMA3 = "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>"
_LLAMA3_BOS = "<|begin_of_text|>"
_COHERE = "<BOS_TOKEN> <EOS_TOKEN> <|END_OF_TURN_TOKEN|>"
_COHERE_PLAIN = "<|START_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|>"
_GEMMA4 = (
    "<bos> <eos> <|turn> <turn|> <|channel> <channel|> <|think|> <|tool> <tool|> <|tool_call> <tool_call|> "
    '<|tool_response> <tool_response|> <|"|> <|image|>'
)

FAMILIES = (
    Family("Qwen 2.5", "qwen2_5 qwen2_5_vl", _QWEN, "<|im_end|>", plain="<tool_call> </tool_call>"),
    Family("Qwen 3", "qwen3 qwen3_instruct_2507 qwen3_vl", _QWEN, "<|im_end|>", plain=_TOOLS_AND_THINK),
    Family(
        "Qwen 3.5 to 3.8",
        "qwen3_5_nothink qwen3_5_think qwen3_6 qwen3_8",
        _QWEN,
        "<|im_end|>",
        plain=_TOOLS_AND_THINK,
    ),
    Family(
        "Nemotron 3",
        "nemotron_3_nano nemotron_3_super nemotron_3_ultra nemotron_3_5_lightning",
        "<s> </s> <|im_start|> <|im_end|>",
        "<|im_end|>",
        bos="<s>",
        plain=_TOOLS_AND_THINK,
        alternate="</s>",
    ),
    Family(
        "LFM2",
        "lfm2 lfm2_v2 lfm2_2_5 lfm2_2_5_v2 lfm2_2_5_vl",
        "<|startoftext|> <|endoftext|> <|im_start|> <|im_end|> <|tool_list_start|> <|tool_list_end|> "
        "<|tool_call_start|> <|tool_call_end|> <|tool_response_start|> <|tool_response_end|>",
        "<|im_end|>",
        bos="<|startoftext|>",
        plain="<think> </think>",
    ),
    Family("Llama 3", "llama3", _LLAMA3, "<|end_of_text|>", _LLAMA3_BOS, alternate="<|end_of_text|>"),
    Family(
        "Llama 3.1, 3.2",
        "llama3_1 llama3_2",
        f"{_LLAMA3} <|eom_id|> <|python_tag|>",
        "<|eot_id|>",
        _LLAMA3_BOS,
        alternate="<|end_of_text|>",
    ),
    Family(
        "DeepSeek",
        "deepseekv3 deepseek_r1_distill",
        "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜▁pad▁｜> <|EOT|>",
        "<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
        plain="<｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> "
        "<｜tool▁call▁end｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> "
        "<｜tool▁output▁end｜> <｜tool▁sep｜> <think> </think>",
        alternate="<|EOT|>",
    ),
    Family(
        "GLM 4",
        "glm4moe",
        "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>",
        "<|endoftext|>",
        plain=f"{_TOOLS_AND_THINK} <arg_key> </arg_key> <arg_value> </arg_value> /nothink",
    ),
    Family(
        "GPT-OSS",
        "gptoss",
        "<|startoftext|> <|endoftext|> <|return|> <|constrain|> <|channel|> <|start|> <|end|> <|message|> "
        "<|call|>",
        "<|return|>",
        bos="<|startoftext|>",
    ),
    Family(
        "Gemma 1 to 3",
        "gemma gemma3",
        "<bos> <eos> <start_of_turn> <end_of_turn> <start_of_image>",
        "<eos>",
        "<bos>",
        alternate="<eos>",
    ),
    Family(
        "Gemma 4",
        "gemma4 gemma4_v3 gemma4_v4 gemma4_v5 diffusion_gemma",
        _GEMMA4,
        "<eos>",
        "<bos>",
        alternate="<eos>",
    ),
    Family("Gemma 4, first release", "gemma4_v2", _GEMMA4, "<eos>", "<bos>", alternate="<eos>"),
    Family("Cohere", "cohere", _COHERE, "<|END_OF_TURN_TOKEN|>", "<BOS_TOKEN>", _COHERE_PLAIN, "<EOS_TOKEN>"),
    Family(
        "Cohere 2",
        "cohere2",
        _COHERE,
        "<|END_OF_TURN_TOKEN|>",
        "<BOS_TOKEN>",
        plain=f"{_COHERE_PLAIN} <|START_RESPONSE|> <|END_RESPONSE|>",
        alternate="<EOS_TOKEN>",
    ),
    Family(
        "Phi 3",
        "phi3 phi3_5",
        "<s> </s> <|endoftext|> <|system|> <|user|> <|assistant|> <|end|>",
        "<|endoftext|>",
        bos="<s>",
        rstrip="</s> <|system|> <|user|> <|assistant|> <|end|>",
    ),
    Family(
        "Muse Glimmer",
        "muse_glimmer",
        "<|begin_of_text|> <|end_of_text|> <|start|> <|message|> <|eot|> <|eom|>",
        "<|eot|>",
        bos="<|begin_of_text|>",
        alternate="<|end_of_text|>",
    ),
    Family(
        "Idefics 3, SmolVLM",
        "idefics3 smolvlm",
        "<|begin_of_text|> <|end_of_text|> <|im_start|> <end_of_utterance> <image> <fake_token_around_image>",
        "<end_of_utterance>",
        alternate="<|end_of_text|>",
    ),
    Family("LLaVA-NeXT", "llava_next", "<unk> <s> </s> <image> <pad>", "</s>", "<s>", alternate=None),
)

FAMILY_OF = {name: family for family in FAMILIES for name in family.templates.split()}
"""The family of each template of `trl`."""


def template_files() -> dict[str, Path]:
    """The template files of the package `trl` by name. The package is not imported: it would import torch."""
    files = importlib.metadata.files("trl") or []
    paths = (Path(str(file.locate())) for file in files if file.match("trl/chat_templates/*.jinja"))
    return {path.stem: path for path in paths if not path.stem.endswith("_training")}
