"""Loads a tokenizer, its chat template, and the related fields of the model's configuration."""

import json
import os
from pathlib import Path
from typing import Any

from chat_tokenizer.errors import TokenizerUnavailable
from chat_tokenizer.tekken import NAME, load_tekken
from chat_tokenizer.template import merge_templates


def load_files(
    source: str,
    chat_template: str | None,
    revision: str | None,
    trust_remote_code: bool,
    tekken: bool = False,
) -> tuple[Any, int, frozenset[int]]:
    """Load from a folder or the hub. Arguments and errors are those of `ChatTokenizer.load`.

    Returns:
        the transformers tokenizer with its chat template, if it has one, the size of the vocabulary, and the
        ids that end a turn: the tokenizer's EOS, and `eos_token_id` of the generation config.
    """
    check_source(source)
    tokenizer = _tekken(source, revision) if tekken else _tokenizer(source, revision, trust_remote_code)
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
    sizes = [part.get("vocab_size") or 0 for part in (config, config.get("text_config") or {})]
    stops = generation.get("eos_token_id", config.get("eos_token_id"))
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
    names = ("tokenizer.json", "tokenizer_config.json", NAME)
    return _is_path(source) or Path(source).exists() or any(file.name in names for file in found)


def _is_path(source: str) -> bool:
    """Whether it is written as a path, unlike NAME and OWNER/NAME."""
    return source.startswith(("/", ".", "~")) or source.count("/") > 1 or source.endswith(".jinja")


def _tokenizer(source: str, revision: str | None, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer  # slow to import, so only when needed

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, revision=revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        needs = f"cannot load a tokenizer from {source!r}, which needs a tokenizer.json or a {NAME}"
        return _tekken(source, revision, f"{needs}: {error}")
    if getattr(tokenizer, "backend_tokenizer", None) is not None:
        return tokenizer
    return _tekken(
        source,
        revision,
        f"{source!r} has no fast tokenizer: convert it, so that it has a tokenizer.json",
    )


def _tekken(source: str, revision: str | None, problem: str = f"there is no {NAME}") -> Any:
    """Mistral's own vocabulary. Raises TokenizerUnavailable with `problem` if there is none."""
    if (file := _file(source, NAME, revision)) is None:
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
