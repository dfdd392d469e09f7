"""The tokenizers of the matrix."""

import json

import pytest
from tokenizers import Tokenizer

from proxy.demo.checkpoint import ensure_checkpoint
from tests.support.templates.families import FAMILY_OF, template_files
from tests.support.templates.matrix import Matrix, Trial
from tests.support.templates.pairing import FAST_SAMPLE, pairing, trl_pairings
from tests.support.templates.sampling import Turn
from tests.support.templates.shapes import SHAPES
from tests.support.templates.vocabularies import VOCABULARIES, byte_level, smollm2_merges


def test_every_template_of_trl_has_a_family() -> None:
    assert set(FAMILY_OF) == set(template_files())


def test_fast_sample_has_every_vocabulary() -> None:
    assert {pairing(name).vocabulary for name in FAST_SAMPLE} == set(VOCABULARIES)


@pytest.mark.slow
def test_fast_sample_has_every_way_to_end_a_turn(matrix: Matrix) -> None:
    ways = {each.name: _ways_to_end(matrix.trial(each)) for each in trl_pairings()}
    assert {way for name in FAST_SAMPLE for way in ways[name]} == {
        way for each in ways.values() for way in each
    }


def _ways_to_end(trial: Trial) -> set[tuple[str, str]]:
    """How turns end: with the stop token of the rendering, with another, or with an opener."""
    turns = [trial.turn(shape, "none") for shape in SHAPES]
    ends = [(turn.shape.kind, turn.end) for turn in turns if isinstance(turn, Turn)]
    return {
        (kind, "opener" if not end.close else "as shown" if end.stop == end.sampled_stop else "another token")
        for kind, end in ends
    }


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
