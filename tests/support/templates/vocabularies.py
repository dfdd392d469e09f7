"""Small vocabularies of each kind that models have, for the stand-ins of their tokenizers.

The byte-level BPE has the first merges of SmolLM2, the model of the demo; a part, so that loading takes
milliseconds. The merges are in a file, because the package of the model cannot be read without torch. In the
SentencePiece vocabularies the ids of a text depend on the text before it.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

MERGES_FILE = Path(__file__).with_name("smollm2_merges.txt")
_SPACE = "▁"
_STRIP = decoders.Strip(" ", 1, 0)
"""Takes the added `▁` away again, so decoded texts do not show it."""
_CORPUS = (
    "the weather in Zürich is sunny today and the clock in Oslo says nine " * 3,
    "user model assistant",
)


@functools.cache
def smollm2_merges() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The first 6,000 tokens of SmolLM2 that are not special, with their ids, and their merges.

    The first line of `MERGES_FILE` has the single characters; each further line has one merge, by rank.
    """
    characters, *lines = MERGES_FILE.read_text("utf-8").splitlines()
    merges = [(left, right) for left, right in map(str.split, lines)]
    tokens = [*characters.split(), *(left + right for left, right in merges)]
    return {token: index for index, token in enumerate(tokens)}, merges


def byte_level() -> Tokenizer:
    """Bytes and real merges: the ids after a special token never depend on the text before it."""
    vocab, merges = smollm2_merges()
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, continuing_subword_prefix="", end_of_word_suffix="")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(*decoding: decoders.Decoder) -> Tokenizer:
    """A BPE with `▁` for spaces and byte fallback, as in converted SentencePiece models.

    Args:
        decoding: the last steps of its decoder.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(_CORPUS, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    description = json.loads(trained.to_str())
    words = [f"<0x{byte:02X}>" for byte in range(256)]
    words += [token for token in description["model"]["vocab"] if token not in words]
    vocab = {token: index for index, token in enumerate(words)}
    description["model"] |= {"vocab": vocab, "byte_fallback": True}
    tokenizer = Tokenizer.from_str(json.dumps({**description, "added_tokens": [], "pre_tokenizer": None}))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *decoding]
    )
    return tokenizer


def gemma_like() -> Tokenizer:
    """Replaces spaces by `▁`; adds nothing before a text."""
    tokenizer = _sentencepiece()
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    return tokenizer


def llama2_like() -> Tokenizer:
    """Adds `▁` before every stretch of text, also after each special token."""
    tokenizer = _sentencepiece(_STRIP)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
    )
    return tokenizer


def mistral_like() -> Tokenizer:
    """Adds `▁` before the first stretch of text only, so a suffix that is encoded alone has one too many."""
    tokenizer = _sentencepiece(_STRIP)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


VOCABULARIES: dict[str, Callable[[], Tokenizer]] = {
    "bytes": byte_level,
    "gemma_like": gemma_like,
    "llama2_like": llama2_like,
    "mistral_like": mistral_like,
}
