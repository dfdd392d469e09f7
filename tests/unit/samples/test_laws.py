"""What holds for the samples of every tree, whatever its shape."""

from collections import Counter

from hypothesis import given, settings

from tests.support.trees import random_trees
from tokenproxy.record.turn import Turn, unpack_ids
from tokenproxy.samples.samples import Sample, Selection, samples_of

Tree = tuple[list[Turn], dict[str, float]]
every_tree = settings(derandomize=True, max_examples=40)


def _ids(turn: Turn, turns: dict[str, Turn]) -> list[int]:
    """Prompt and completion of a turn, straight from the records."""
    before = _ids(turns[turn.parent], turns) if turn.parent else []
    return before + unpack_ids(turn.appended) + unpack_ids(turn.completion)


def _sound(turns: list[Turn]) -> set[str]:
    by_id = {turn.id: turn for turn in turns}

    def sound(turn: Turn) -> bool:
        return not turn.problem and (turn.parent is None or sound(by_id[turn.parent]))

    return {turn.id for turn in turns if sound(turn)}


def _in_samples(samples: list[Sample], only_trained: bool = False) -> Counter[str]:
    """How many samples hold each turn, or train it."""
    return Counter(span.id for sample in samples for span in sample.turns if span.trained or not only_trained)


@every_tree
@given(random_trees())
def test_ids_mask_and_logprobs_of_a_sample_agree(tree: Tree) -> None:
    turns, rewards = tree
    by_id = {turn.id: turn for turn in turns}
    for sample in samples_of(turns, rewards).samples:
        assert sample.prompt_ids + sample.completion_ids == _ids(by_id[sample.leaf], by_id)
        assert len(sample.completion_ids) == len(sample.loss_mask) == len(sample.logprobs)
        sampled = {i for span in sample.turns for i in range(span.start, span.end)}
        assert {i for i, logprob in enumerate(sample.logprobs) if logprob is not None} == sampled
        trained = {i for span in sample.turns if span.trained for i in range(span.start, span.end)}
        assert {i for i, bit in enumerate(sample.loss_mask) if bit} == trained
        for span in sample.turns:
            assert sample.completion_ids[span.start : span.end] == unpack_ids(by_id[span.id].completion)


@every_tree
@given(random_trees())
def test_sound_turns_are_trained_once_or_in_each_sample_that_holds_them(tree: Tree) -> None:
    once, each = samples_of(*tree), samples_of(*tree, selection=Selection("each"))
    sound = _sound(tree[0])
    assert set(_in_samples(once.samples)) == sound
    assert _in_samples(once.samples, only_trained=True) == Counter(sound)
    assert _in_samples(each.samples, only_trained=True) == _in_samples(each.samples)
    # nothing but the masks differs
    assert once.refused == each.refused
    assert [(s.leaf, s.completion_ids, s.logprobs) for s in once.samples] == [
        (s.leaf, s.completion_ids, s.logprobs) for s in each.samples
    ]


@every_tree
@given(random_trees())
def test_every_leaf_is_a_sample_or_refused_and_whole_samples_come_first(tree: Tree) -> None:
    found = samples_of(*tree)
    leaves = {turn.id for turn in tree[0]} - {turn.parent for turn in tree[0]}
    whole = [sample.leaf for sample in found.samples if sample.whole]
    assert sorted([*whole, *(refused.leaf for refused in found.refused)]) == sorted(leaves)
    assert [sample.index for sample in found.samples] == list(range(len(found.samples)))
    assert found.samples == sorted(found.samples, key=lambda sample: (not sample.whole, sample.leaf))
