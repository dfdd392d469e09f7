"""The tokenizers of the matrix."""

import json

import pytest
from tokenizers import Tokenizer

from proxy.demo.checkpoint import ensure_checkpoint
from tests.templates.pairing import PAIRINGS, SAMPLE, TOKENIZERS, Pairing, byte_level, smollm2_merges


def test_sample_has_every_tokenizer_and_every_way_to_end_a_turn() -> None:
    sample = [pairing for pairing in PAIRINGS if pairing.name in SAMPLE]
    assert len(sample) == len(SAMPLE)
    assert {pairing.tokenizer for pairing in sample} == set(TOKENIZERS)
    assert {_ways_to_end(pairing) for pairing in sample} == {_ways_to_end(pairing) for pairing in PAIRINGS}


def _ways_to_end(pairing: Pairing) -> tuple[str, ...]:
    """How turns with and without tool calls end: see `Close`."""
    family = pairing.template.family
    closes = (family.close, family.call_close or family.close)
    return tuple(
        "opener" if not close.shown else "another token" if close.sampled else "as shown" for close in closes
    )


@pytest.mark.slow
def test_stored_merges_are_the_first_of_the_demo_model() -> None:
    description = json.loads((ensure_checkpoint() / "tokenizer.json").read_text("utf-8"))
    added = {token["content"] for token in description["added_tokens"]}
    model = description["model"]
    vocab, merges = smollm2_merges()
    by_rank = sorted(model["vocab"].keys() - added, key=model["vocab"].get)
    assert list(vocab) == by_rank[:6000]
    assert merges == [tuple(pair) for pair in model["merges"] if {*pair, "".join(pair)} <= vocab.keys()]

    model |= {"vocab": vocab, "merges": merges}
    reference = Tokenizer.from_str(json.dumps({**description, "added_tokens": [], "post_processor": None}))
    assert json.loads(byte_level().to_str()) == json.loads(reference.to_str())
