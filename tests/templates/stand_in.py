"""Tokenizers for templates whose models are not at hand.

The vocabulary is the byte-level BPE of `pairing`. The added tokens are guessed from the template's text and from
what it prints: whatever is spelled like a special token is one. A template does not tell the spelling of BOS and EOS
where it reads them from variables; then they get a common spelling that fits its other tokens.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.templates.corpus import CorpusTemplate
from tests.templates.pairing import byte_level

_SPECIAL = re.compile(
    # <|im_end|>, the same with full-width bars, <|turn>, <turn|>
    r"<\|[^<>|\s'\"{}]{1,40}\|>|<\uff5c[^<>\s'\"{}]{1,40}\uff5c>|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>"
    # <s>, </s>, <bos>, <start_of_turn>, <sop>
    r"|</?s>|<[be]os>|<(?:start|end)_of_[a-z]+>|<sop>|<unk>|\[gMASK\]|<(?:BOS|EOS)_TOKEN>"
)
_PLAIN = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value|tool_calls_section|answer)>")
_BRACKETS = re.compile(r"\[/?[A-Z]+(?:_[A-Z]+)*\]")
_BRACKET_MODELS = ("[AVAILABLE_TOOLS]", "[SYSTEM_PROMPT]", "[TOOL_CALLS]")
"""`[INST]` is a token only of models that have one of these too."""
_BOS = (
    "<|begin_of_text|>",
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    "<bos>",
    "<BOS_TOKEN>",
    "<|startoftext|>",
)
_EOS = ("<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<eos>", "<EOS_TOKEN>", "<|endoftext|>")
OTHER_STOP = "<|other_stop|>"
"""A stop token of every stand-in that no template prints."""


@dataclass(frozen=True)
class StandIn:
    """The tokenizer of a template, and its named tokens."""

    tokenizer: Any
    """A transformers tokenizer that carries the template."""
    eos: str
    """Printed where the template reads `eos_token`; otherwise the stop token of no turn."""

    def id_of(self, token: str) -> int:
        number: int = self.tokenizer.convert_tokens_to_ids(token)
        return number


def stand_in(template: CorpusTemplate, renderings: Iterable[str] = ()) -> StandIn:
    """A tokenizer for a template.

    Args:
        renderings: what the template prints, to find tokens that it puts together from pieces.
    """
    special, plain = added_tokens([template.text, *renderings])
    bos = _named(_BOS, "<s>", special)
    eos = _named(_EOS, "</s>", special)
    backend = byte_level()
    every = dict.fromkeys([bos, eos, OTHER_STOP, *special])
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in every])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    named = {"eos_token": eos}
    if "bos_token" in template.variables:
        named["bos_token"] = bos
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    tokenizer.chat_template = template.text
    return StandIn(tokenizer, eos)


def added_tokens(texts: Iterable[str]) -> tuple[list[str], list[str]]:
    """What is spelled like an added token: special ones, and others; both sorted."""
    whole = "\n".join(texts)
    special, plain = set(_SPECIAL.findall(whole)), set(_PLAIN.findall(whole))
    if any(token in whole for token in _BRACKET_MODELS):
        special |= set(_BRACKETS.findall(whole))
    return sorted(special), sorted(plain)


def _named(spellings: tuple[str, ...], default: str, tokens: list[str]) -> str:
    return next((spelling for spelling in spellings if spelling in tokens), default)
