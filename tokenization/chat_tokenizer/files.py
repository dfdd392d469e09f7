"""Loads a tokenizer, its chat template, and the related fields of the model's configuration.

Mistral's `tekken.json`, a byte-level BPE vocabulary in the form of tiktoken, becomes a fast tokenizer. The
ranks of tiktoken become merges as in transformers' `TikTokenConverter`: each token is split into all pairs of
shorter tokens, and the pairs are merged in the order of the tokens that they make.
"""

import base64
import json
import os
from pathlib import Path
from typing import Any, Final, Literal

from chat_tokenizer.encoder import byte_alphabet
from chat_tokenizer.errors import TokenizerUnavailable
from chat_tokenizer.template import merge_templates

TEKKEN: Final = "tekken.json"
VocabularyFile = Literal["tokenizer.json", "tekken.json"]
_SPECIAL_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""Those of files that list none: mistral-common's `Tekkenizer.DEPRECATED_SPECIAL_TOKENS`."""
_EOS = "</s>"


def load_tekken(path: Path) -> Any:
    """A transformers tokenizer with the vocabulary of the file, and no chat template.

    Raises:
        TokenizerUnavailable: the file is not one of Mistral's.
    """
    from transformers import PreTrainedTokenizerFast

    try:
        content = json.loads(path.read_text("utf-8"))
        config = content["config"]
        special_count = config["default_num_special_tokens"]
        size = config["default_vocab_size"] - special_count
        ranks = {base64.b64decode(each["token_bytes"]): each["rank"] for each in content["vocab"][:size]}
        listed = content.get("special_tokens")
        special = [each["token_str"] for each in listed] if listed else list(_SPECIAL_TOKENS)
        special += [f"<SPECIAL_{number}>" for number in range(len(special), special_count)]
        backend = _backend(ranks, special, config["pattern"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TokenizerUnavailable(f"{path} is not a vocabulary of Mistral's: {error!r}") from error
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=_EOS)


def _backend(ranks: dict[bytes, int], special: list[str], pattern: str) -> Any:
    """The tokenizer of the ranks; a token's id is its rank after the special tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    names = {token: "".join(letters[byte] for byte in token) for token in ranks}
    vocabulary = {text: number for number, text in enumerate(special)}
    vocabulary |= {names[token]: rank + len(special) for token, rank in ranks.items()}
    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = ((token[:end], token[end:]) for end in range(1, len(token)))
        found = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        found.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(names[left], names[right]) for left, right in found]
    # tiktoken takes a word that is a token as it is
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return backend


def load_files(
    source: str,
    chat_template: str | None,
    revision: str | None,
    trust_remote_code: bool,
    file: VocabularyFile | None = None,
) -> tuple[Any, int, frozenset[int]]:
    """Load from a folder or the hub. Arguments and errors are those of `ChatTokenizer.load`.

    Returns:
        the transformers tokenizer with its chat template, if it has one, the size of the vocabulary, and the
        ids that end a turn: the tokenizer's EOS, and `eos_token_id` of the generation config or the model's.
    """
    check_source(source)
    tekken = file == TEKKEN
    tokenizer = _tekken(source, revision) if tekken else _tokenizer(source, revision, trust_remote_code, file)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    elif not tekken:
        # multimodal models may keep the template that their processor uses in a file of its own
        legacy = _config(source, "chat_template.json", revision)
        processor = _config(source, "processor_config.json", revision).get("chat_template")
        template = processor or legacy.get("chat_template")
        tokenizer.chat_template = merge_templates(tokenizer.chat_template, template)
    config = _config(source, "config.json", revision)
    generation = _config(source, "generation_config.json", revision)
    # multimodal models have the vocabulary size in `text_config`
    text_config = config.get("text_config") or {}
    sizes = [part.get("vocab_size") or 0 for part in (config, text_config)]
    # without the file, transformers and vLLM make the generation config of the model's
    found = (part.get("eos_token_id") for part in (generation, config, text_config))
    stops = next((each for each in found if each is not None), None)
    stops = stops if isinstance(stops, list) else [stops]
    stop_ids = frozenset(stop for stop in [tokenizer.eos_token_id, *stops] if isinstance(stop, int))
    return tokenizer, max([len(tokenizer), *sizes]), stop_ids


def check_source(source: str) -> None:
    """Refuse a path at which nothing is, before a hub is asked for a model of that name.

    Raises:
        TokenizerUnavailable: `source` is written as a path, unlike NAME and OWNER/NAME, and does not exist.
    """
    if _is_path(source) and not Path(source).exists():
        raise TokenizerUnavailable(
            f"there is nothing at {source}: name a folder that exists, or a model of the hub as OWNER/NAME"
        )


def is_here(source: str) -> bool:
    """Whether a tokenizer is loaded without a download, which may take for ever where there is no network.

    It is in a folder, or in the cache of the hub, whose library takes too long to import for this question.
    """
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    found = cache.glob(f"models--{source.replace('/', '--')}/snapshots/*/*.json")
    names = ("tokenizer.json", "tokenizer_config.json", TEKKEN)
    return _is_path(source) or Path(source).exists() or any(file.name in names for file in found)


def _is_path(source: str) -> bool:
    """Whether it is written as a path, unlike NAME and OWNER/NAME."""
    return source.startswith(("/", ".", "~")) or source.count("/") > 1 or source.endswith(".jinja")


def _tokenizer(
    source: str, revision: str | None, trust_remote_code: bool, file: VocabularyFile | None
) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # slow to import, so only when needed

    # the class that the configuration names may build another tokenizer than the one in the file
    loader = PreTrainedTokenizerFast if file else AutoTokenizer
    try:
        tokenizer = loader.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        needs = f"cannot load a tokenizer from {source!r}, which needs a tokenizer.json or a {TEKKEN}"
        return _tekken(source, revision, f"{needs}: {error}")
    if getattr(tokenizer, "backend_tokenizer", None) is not None:
        return tokenizer
    return _tekken(
        source,
        revision,
        f"{source!r} has no fast tokenizer: convert it, so that it has a tokenizer.json",
    )


def _tekken(source: str, revision: str | None, problem: str = f"there is no {TEKKEN}") -> Any:
    """Mistral's own vocabulary. Raises TokenizerUnavailable with `problem` if there is none."""
    if (file := _file(source, TEKKEN, revision)) is None:
        raise TokenizerUnavailable(problem)
    return load_tekken(file)


def _config(source: str, name: str, revision: str | None) -> dict[str, Any]:
    """A configuration file of the model; empty if there is none, because it is optional."""
    try:
        file = _file(source, name, revision)
        content = json.loads(file.read_text()) if file else {}
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _file(source: str, name: str, revision: str | None) -> Path | None:
    """A file of the model; None if it has none, or the hub does not respond."""
    from transformers.utils import cached_file

    try:
        path = cached_file(source, name, revision=revision)
    except (OSError, ValueError):
        return None
    return Path(path) if path else None
