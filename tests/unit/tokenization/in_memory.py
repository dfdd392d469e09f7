"""Chat tokenizers for templates written in a test: a token for each byte, and added tokens; no files."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from chat_tokenizer import ChatTokenizer
from chat_tokenizer.encoder import Encoder

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|eos|>")
"""The special tokens of ChatML, and an EOS that no template prints."""


@cache
def _bytes() -> str:
    """The description of a tokenizer with a token for each byte."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(characters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str()


def tokenizer_with(
    template: str,
    *,
    special: Sequence[str] = SPECIAL,
    plain: Sequence[str] = (),
    stops: Sequence[str] = ("<|im_end|>", "<|eos|>"),
    backend: Tokenizer | None = None,
) -> ChatTokenizer:
    """A tokenizer with this template; its added tokens are given by their texts."""
    backend = backend or Tokenizer.from_str(_bytes())
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend)
    fast.chat_template = template
    stop_ids = (backend.token_to_id(text) for text in stops)
    known_stops = frozenset(stop for stop in stop_ids if stop is not None)
    return ChatTokenizer("in memory", len(fast), fast, Encoder(backend.to_str()), known_stops)


def token_id(tokenizer: ChatTokenizer, text: str) -> int:
    """The id of an added token."""
    (number,) = tokenizer.encode(text)
    return number


def appended_text(
    tokenizer: ChatTokenizer, last: str, new: Sequence[dict[str, Any]], **options: Any
) -> tuple[str, str]:
    """The texts of the ids that close the turn and of the ids after them.

    Args:
        last: the text whose last id was sampled last.
    """
    appended = tokenizer.append(tokenizer.encode(last), new, **options)
    return tokenizer.decode(appended.close_ids), tokenizer.decode(appended.suffix_ids)
