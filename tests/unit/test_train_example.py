"""What `make train-demo` computes without an engine: the game, the mismatch, the report."""

import json
import math
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Any

import pytest

from examples.train.game import HIGHEST, TURNS, Game, opening, prompt
from examples.train.mismatch import Mismatch, aligned, samples_needed
from examples.train.report import HEAD, Step, row, table, write

_STEP = Step("exact", 1, 0.5, 0.0, 0.0, 1.0, 0.75, 100, 20.0)
_OTHER = Step("text", 1, 0.25, 0.5, 0.25, 2.5, 0.5, 300, 30.0)


def _call(arguments: str, name: str = "guess") -> dict[str, Any]:
    return {"id": "call-1", "type": "function", "function": {"name": name, "arguments": arguments}}


def _guess(number: int) -> dict[str, Any]:
    return _call(json.dumps({"number": number}))


@pytest.mark.parametrize("offset, word", [(1, "lower"), (-1, "higher"), (0, "correct")])
def test_the_game_tells_where_the_number_is(offset: int, word: str) -> None:
    game = next(game for game in map(Game, range(99)) if 1 < game.secret < HIGHEST)
    [answer] = game.respond([_guess(game.secret + offset)])
    assert (answer["role"], answer["tool_call_id"], answer["content"]) == ("tool", "call-1", word)
    assert game.over == (word == "correct")


@pytest.mark.parametrize(
    "arguments, name",
    [
        ("", "guess"),
        ("[]", "guess"),
        ("{}", "guess"),
        ('{"number": "5"}', "guess"),
        ('{"number": 0}', "guess"),
        ('{"number": 5}', "add"),
    ],
)
def test_calls_that_are_no_guess_score_nothing(arguments: str, name: str) -> None:
    game = Game(1)
    [answer] = game.respond([_call(arguments, name)])
    assert answer["content"].startswith("error")
    assert game.scores == [0.0]


def test_the_reward_counts_closeness_calls_and_saved_turns() -> None:
    lucky, mute, slow = Game(7), Game(7), Game(7)
    lucky.respond([_guess(lucky.secret)])
    assert (lucky.reward, lucky.over) == (1.0, True)
    for _ in range(TURNS):
        assert not mute.over
        assert mute.respond([])[0]["role"] == "user"
    assert (mute.reward, mute.over) == (0.0, True)
    slow.respond([])
    slow.respond([_guess(slow.secret)])
    assert slow.reward == 1 - 1 / TURNS


def test_the_prompt_ends_with_its_game() -> None:
    messages = prompt(12)
    assert messages[-1] == {"role": "user", "content": opening(12)}
    assert prompt(13)[:-1] == messages[:-1]


def test_tokens_that_differ_are_counted() -> None:
    mismatch = Mismatch()
    mismatch.add([0, 1, 1, 1, 1], [0.0, -1.0, -1.0, math.nan, -2.0], [-9.0, -1.05, -1.2, -1.0, math.nan])
    assert (mismatch.trained, mismatch.differing, mismatch.unsampled) == (4, 3, 1)
    assert (mismatch.share, mismatch.unsampled_share) == (0.75, 0.25)
    assert Mismatch().share == 0.0


def test_records_are_aligned_with_the_ids_that_are_trained() -> None:
    found = aligned([5, 6, 7, 8, 2], [-0.5, -0.6, -0.7, -0.8, -0.2], [5, 67, 8, 2])
    assert [None if math.isnan(value) else value for value in found] == [-0.5, None, -0.8, -0.2]


def test_a_turn_that_breaks_off_begins_a_sample() -> None:
    turns = [([1, 2], [3]), ([1, 2, 3, 4], [5]), ([1, 2, 3, 4, 6, 7], [8]), ([1, 2, 3, 4, 6, 7, 8], [9])]
    assert samples_needed(turns) == 2
    assert samples_needed(turns[:1]) == 1


def test_the_report(tmp_path: Path) -> None:
    assert len(row(_OTHER)) == len(HEAD)
    runs = [[_STEP, _STEP], [_OTHER, Step("text", 2, 0.75, 0.1, 0.0, 1.0, 0.7, 100, 20.0)]]
    lines = table(runs).splitlines()
    assert lines[0] == "| 2 steps | exact | text |"
    assert "| of these, log-probability differs by more than 0.1 | 0.00% | 40.00% |" in lines
    assert "| reward, first and last step | 0.50, 0.50 | 0.25, 0.75 |" in lines
    write(tmp_path, runs)
    assert len((tmp_path / "steps.csv").read_text().splitlines()) == 5
    picture = xml.parse(tmp_path / "training.svg").getroot()
    assert len(picture.findall(".//{*}polyline")) == 6
