"""Tokenizers for templates whose models are not available: a small vocabulary with the added tokens of the
model.

Where nothing declares the added tokens, they are guessed from the template's text and from what it prints:
whatever is spelled like a special token is one. A template does not tell the spelling of BOS and EOS where
it reads them from variables; then they get a common spelling that fits its other tokens.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.support.templates.corpus import FOLDER, ChatTemplate
from tests.support.templates.families import Family
from tests.support.templates.vocabularies import VOCABULARIES

_SPECIAL = re.compile(
    # <|im_end|>, the same with full-width bars, <|turn>, <turn|>
    r"<\|[^<>|\s'\"{}]{1,40}\|>|<\uff5c[^<>\s'\"{}]{1,40}\uff5c>|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>"
    # <s>, </s>, <bos>, <start_of_turn>, <sop>
    # ]~b], [e~[
    r"|\]~!?b[\[\]]|\[e~\["
    # [|endofturn|]
    r"|\[\|[a-z_]+\|\]"
    # <SPECIAL_12>, <longcat_user>, <role>, <assistant>, <beginning_of_sentence>, <sep>
    r"|<[A-Za-z]+_\d+>|</?longcat_[a-z_]+>|</?(?:role|assistant|user|system)>|<(?:beginning|end)_of_sentence>|<sep>"
    # <seed:eos>, <eos:6124c78e>
    r"|</?[a-z_]+:[0-9a-z_]+>"
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
"""A stop token that no template prints."""
_FIRST_SPACE = " as Mistral's"
MISTRAL = "tokenizer-llama2" + _FIRST_SPACE
"""The tokenizer of Llama 2 with a space before the first text only, as that of Mistral 7B v0.3."""


@dataclass(frozen=True)
class StandIn:
    """The tokenizer of a template, and the tokens that end a turn."""

    tokenizer: Any
    """A transformers tokenizer that carries the template."""
    eos: str
    other_stop: str
    """A stop token that does not close the turns of this template."""
    eos_is_a_guess: bool = False
    """Nothing tells the EOS: the token that closes turns may be taken for it."""

    def id_of(self, token: str) -> int:
        number: int = self.tokenizer.convert_tokens_to_ids(token)
        return number


def declared(template: ChatTemplate, family: Family, vocabulary: str) -> StandIn:
    """A tokenizer with the added tokens of the model.

    Args:
        vocabulary: a key of `VOCABULARIES`, or the folder of a real tokenizer.
    """

    def added(text: str, *, special: bool) -> AddedToken:
        return AddedToken(text, special=special, normalized=False, rstrip=text in family.rstrip.split())

    backend = _backend(vocabulary)
    other_stop = family.alternate or OTHER_STOP
    backend.add_special_tokens([added(text, special=True) for text in [*family.special.split(), other_stop]])
    backend.add_tokens([added(text, special=False) for text in family.plain.split()])
    return StandIn(_fast(template, backend, family.eos, family.bos), family.eos, other_stop)


def _backend(vocabulary: str) -> Tokenizer:
    if vocabulary in VOCABULARIES:
        return VOCABULARIES[vocabulary]()
    path = FOLDER / vocabulary.removesuffix(_FIRST_SPACE) / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run scripts/fetch-templates")
    description = json.loads(path.read_text("utf-8"))
    if vocabulary.endswith(_FIRST_SPACE):
        first = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
        description |= {"normalizer": None, "pre_tokenizer": first}
    return Tokenizer.from_str(json.dumps(description))


def guessed(template: ChatTemplate, renderings: Iterable[str] = (), vocabulary: str = "bytes") -> StandIn:
    """A tokenizer with added tokens guessed from the template.

    Args:
        renderings: what the template prints, to find tokens that it puts together from pieces.
        vocabulary: as in `declared`.
    """
    special, plain = added_tokens([template.text, *renderings])
    bos = _named(_BOS, "<s>", special)
    eos = _named(_EOS, "</s>", special)
    backend = _backend(vocabulary)
    every = dict.fromkeys([bos, eos, OTHER_STOP, *special])
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in every])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    tokenizer = _fast(template, backend, eos, bos if "bos_token" in template.variables else None)
    return StandIn(tokenizer, eos, OTHER_STOP, "eos_token" not in template.variables)


def _fast(template: ChatTemplate, backend: Tokenizer, eos: str, bos: str | None) -> Any:
    named = {"eos_token": eos, "bos_token": bos}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, **{name: text for name, text in named.items() if text is not None}
    )
    tokenizer.chat_template = template.text
    return tokenizer


def added_tokens(texts: Iterable[str]) -> tuple[list[str], list[str]]:
    """What is spelled like an added token: special ones, and others; both sorted."""
    whole = "\n".join(texts)
    special, plain = set(_SPECIAL.findall(whole)), set(_PLAIN.findall(whole))
    if any(token in whole for token in _BRACKET_MODELS):
        special |= set(_BRACKETS.findall(whole))
    return sorted(special), sorted(plain)


def _named(spellings: tuple[str, ...], default: str, tokens: list[str]) -> str:
    return next((spelling for spelling in spellings if spelling in tokens), default)
