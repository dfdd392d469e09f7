"""Loads Mistral's `tekken.json`, a byte-level BPE vocabulary in the form of tiktoken, as a fast tokenizer.

The ranks of tiktoken become merges as in transformers' `TikTokenConverter`: each token is split into all
pairs of shorter tokens, and the pairs are merged in the order of the tokens that they make.
"""

import base64
import json
from pathlib import Path
from typing import Any

from chat_tokenizer.errors import TokenizerUnavailable
from chat_tokenizer.token_bytes import byte_alphabet

NAME = "tekken.json"
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
