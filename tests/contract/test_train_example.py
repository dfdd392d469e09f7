"""The two kinds of rollouts of `make train-demo`, on an engine whose ids a tokenizer would not give."""

import math
from collections.abc import Callable

import pytest

from examples.train.game import TURNS, Game, opening
from examples.train.rollouts import ExactRollouts, RetokenisedRollouts, Rollout
from tests.support.fake_vllm import Reply
from tests.support.talk import Talk
from tests.support.tiny_model import END, SPLIT, TinyModel
from tests.support.utils import Pair

_GAMES = (3, 4)


@pytest.fixture
def letters(talk: Callable[..., Talk]) -> Pair:
    """An engine that samples "hello" letter by letter in each turn."""
    pair = talk().pair
    pair.fake.usual = Reply(SPLIT)
    return pair


def _trained(rollout: Rollout) -> list[int]:
    return [token for token, trained in zip(rollout.completion_ids, rollout.mask, strict=True) if trained]


def test_rollouts_over_the_proxy_train_what_was_sampled(letters: Pair, tiny_model: TinyModel) -> None:
    rollouts = ExactRollouts("tiny", str(letters.client.base_url)).play(_GAMES, 1)
    for number, rollout in zip(_GAMES, rollouts, strict=True):
        assert opening(number) in tiny_model.decode(rollout.prompt_ids)
        assert _trained(rollout) == [*SPLIT] * TURNS
        assert not any(map(math.isnan, rollout.logprobs))
        assert (rollout.samples, rollout.reward) == (1, 0.0)


def test_rollouts_that_are_tokenised_again_train_other_ids(letters: Pair, tiny_model: TinyModel) -> None:
    hello = tiny_model.encode("hello")
    assert len(hello) < len(SPLIT) - 1
    rollouts = RetokenisedRollouts("tiny", letters.fake.url, tiny_model.reference).play(_GAMES, 1)
    for rollout in rollouts:
        assert _trained(rollout) == [*hello, END] * TURNS
        unsampled = [
            token
            for token, known in zip(rollout.completion_ids, rollout.logprobs, strict=True)
            if math.isnan(known)
        ]
        assert unsampled and set(unsampled) <= set(hello) - set(SPLIT)
        assert (rollout.samples, rollout.reward) == (TURNS, 0.0)


def test_tool_calls_are_played(letters: Pair) -> None:
    secret = Game(3).secret
    guess = {"name": "guess", "arguments": f'{{"number": {secret}}}'}
    call = {"id": "call-1", "type": "function", "function": guess}
    letters.fake.usual = Reply(SPLIT, message={"content": "", "tool_calls": [call]})
    [rollout] = ExactRollouts("tiny", str(letters.client.base_url)).play([3], 2)
    assert (rollout.reward, _trained(rollout)) == (1.0, [*SPLIT])
    assert len(letters.fake.generations()) == 1
