"""Convert a GGUF file into a checkpoint: `python -m tokenproxy.demo.convert GGUF TEMPLATE FOLDER`.

The only module of the demo that imports torch; `tokenproxy.demo.checkpoint` runs it as a child process.
"""

import sys
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

END_OF_TURN = "<|im_end|>"
END_OF_TURN_ID = 2


def convert(gguf_file: Path, template_file: Path, folder: Path) -> None:
    """Write `gguf_file` as bfloat16 safetensors with its tokenizer, whose template is `template_file`.

    Raises:
        ValueError: the converted model's stop token is not `<|im_end|>` (id 2), or it does not know the
            capital of France.
    """
    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    tokenizer.chat_template = template_file.read_text(encoding="utf-8")
    model = _dense_model(gguf_file)
    _check(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _dense_model(gguf_file: Path) -> LlamaForCausalLM:
    packed = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent,
        gguf_file=gguf_file.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    # A model loaded from GGUF cannot be saved, and with its config vLLM would look for a GGUF file.
    fields = packed.config.to_dict()
    fields.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig.from_dict(fields | {"dtype": "bfloat16"}))
    model.load_state_dict(packed.state_dict())
    model.generation_config = packed.generation_config
    return model.to(torch.bfloat16).eval()


def _check(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError if the conversion is broken, so that it is not cached."""
    stop_ids = (tokenizer.convert_tokens_to_ids(END_OF_TURN), model.generation_config.eos_token_id)
    if stop_ids != (END_OF_TURN_ID, END_OF_TURN_ID):
        raise ValueError(f"stop tokens of tokenizer and generation config: {stop_ids}, not {END_OF_TURN_ID}")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.inference_mode():
        output = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    text = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    if "Paris" not in text:
        raise ValueError(f"prompted for the capital of France, the model returned {text!r}")


if __name__ == "__main__":
    convert(*(Path(argument) for argument in sys.argv[1:4]))
