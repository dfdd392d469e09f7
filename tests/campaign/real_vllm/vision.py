"""A tiny model that takes images, with random weights: Idefics3, whose processor needs no torchvision."""

import base64
import io
import json
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoTokenizer, Idefics3Config, Idefics3ForConditionalGeneration, LlamaConfig
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig

_SIDE, _PATCH, _SCALE, _WIDTH = 64, 16, 2, 128
_MARKS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}<image>{% elif part.type == 'text' %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""


def make_vision_model(text_model: Path, folder: Path) -> Path:
    """Write the checkpoint: 13 million parameters, with the tokenizer of a text model."""
    tokenizer = AutoTokenizer.from_pretrained(text_model)
    tokenizer.add_special_tokens({"additional_special_tokens": _MARKS})
    tokenizer.chat_template = TEMPLATE
    layers = {"hidden_size": _WIDTH, "intermediate_size": 256, "num_hidden_layers": 2}
    text = LlamaConfig(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
        **layers,
    )
    vision = Idefics3VisionConfig(image_size=_SIDE, patch_size=_PATCH, num_attention_heads=2, **layers)
    config = Idefics3Config(
        text_config=text.to_dict(),
        vision_config=vision.to_dict(),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=_SCALE,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    Idefics3ForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = {"longest_edge": _SIDE}
    processor = {
        "image_processor_type": "Idefics3ImageProcessor",
        "processor_class": "Idefics3Processor",
        "do_image_splitting": False,
        "size": size,
        "max_image_size": size,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    length = (_SIDE // _PATCH) ** 2 // _SCALE**2
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": "Idefics3Processor", "image_seq_len": length})
    )
    return folder


def picture(color: str, size: tuple[int, int] = (50, 40), kind: str = "PNG") -> str:
    """An image of one colour as a data URL."""
    out = io.BytesIO()
    Image.new("RGB", size, color).save(out, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(out.getvalue()).decode()}"
