import pytest

from proxy.demo.conversation import Conversation, Turn
from proxy.demo.table import WIDTH, render, summary


def turn(number, *, before=0, reused=0, prompt=100, cached=64, seconds=1.0, completion=48):
    return Turn(number, "answer", prompt, completion, before, reused, cached, seconds, "stop", 0)


EXACT = Conversation("token route", (turn(1), turn(2, before=148, reused=148, prompt=170)))
DRIFTED = Conversation(
    "stock chat route", (turn(1), turn(2, before=148, reused=103, prompt=160, cached=None))
)


def rows(text):
    return [line for line in text.splitlines() if line[:4].strip().isdigit()]


def test_one_row_per_turn_with_both_sides():
    first, second = rows(render(EXACT, DRIFTED))
    assert " ".join(first.split()) == "1 answer | 100 0 100 - 64 48 1.0 | 100 0 100 - 64 48 1.0"
    assert " ".join(second.split()) == "2 answer | 170 148 22 yes 64 48 1.0 | 160 103 57 NO ? 48 1.0"


def test_missing_turns_of_the_shorter_conversation_are_blank():
    one_turn = Conversation("stock chat route", (turn(1),))
    assert rows(render(EXACT, one_turn))[1].count("|") == 2
    assert rows(render(one_turn, EXACT))[1].split("|")[1].strip() == ""


def test_large_numbers_fit_the_terminal_width():
    large = turn(
        12, before=131_072, reused=131_072, prompt=131_072, cached=131_072, seconds=99.9, completion=999
    )
    wide = Conversation("stock chat route", (large, large))
    text = render(wide, wide)
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    for number in ("131072", "99.9"):
        assert f"{number} " in text


@pytest.mark.parametrize(
    ("conversation", "line"),
    [
        (EXACT, "token route: 1 of 1 follow-up turns exact (100%)"),
        (DRIFTED, "stock chat route: 0 of 1 follow-up turns exact (0%), 1 drifted"),
        (Conversation("token route", (turn(1),)), "token route: no follow-up turns"),
    ],
)
def test_summary(conversation, line):
    assert summary(conversation) == line


def test_output_ends_with_both_summaries():
    assert render(EXACT, DRIFTED).splitlines()[-2:] == [summary(EXACT), summary(DRIFTED)]
