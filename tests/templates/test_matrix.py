from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.templates.matrix import Cell, Matrix, Verdict, complaints
from tests.templates.pairing import EVERY_PAIRING, PAIRINGS, Pairing
from tests.templates.report import PAGE, Report, put_into
from tests.templates.shapes import SHAPES
from tokenization import Appended, TemplateUnsupported

_REFUSED_AT_MOST = 0.03


@EVERY_PAIRING
def test_nothing_is_wrong(matrix: Matrix, pairing: Pairing) -> None:
    outcomes = matrix.outcomes(pairing)
    assert Verdict.WRONG not in {outcome.verdict for outcome in outcomes}, complaints(outcomes, Verdict.WRONG)


@pytest.mark.slow
def test_little_is_refused(matrix: Matrix) -> None:
    """A refusal is honest, but a package that refuses everything is of no use."""
    counted = Report(matrix.all_outcomes())
    refused = complaints(counted.outcomes, Verdict.REFUSED)
    assert counted.refused_share < _REFUSED_AT_MOST, f"{counted.markdown()}\n{refused}"


@pytest.mark.slow
def test_the_readme_shows_what_was_counted(matrix: Matrix) -> None:
    """`make templates` renews it."""
    page = PAGE.read_text()
    assert put_into(page, Report(matrix.all_outcomes()).summary()) == page


Answer = Callable[[list[int], list[int]], Appended]
"""Makes an answer of the ids given and those that should follow."""


@dataclass
class _Stub:
    """Answers as it is told, to see whether the judge notices."""

    expected: list[int]
    answer: Answer
    blind_answer: Answer

    def append(self, prompt_ids: list[int], _new: object, *, history: object, **_options: Any) -> Appended:
        return (self.blind_answer if history is None else self.answer)(prompt_ids, self.expected)


def _right(prompt: list[int], expected: list[int]) -> Appended:
    return Appended([*prompt, *expected], expected[:1], expected[1:])


def _one_too_few(prompt: list[int], expected: list[int]) -> Appended:
    return Appended([*prompt, *expected[1:]], [], expected[1:])


def _one_too_many(prompt: list[int], expected: list[int]) -> Appended:
    return Appended([*prompt, expected[0], *expected], expected[:1], expected)


def _prompt_touched(prompt: list[int], expected: list[int]) -> Appended:
    return Appended([*prompt[:-1], prompt[-1] + 1, *expected], [], expected)


def _parts_do_not_add_up(prompt: list[int], expected: list[int]) -> Appended:
    return Appended([*prompt, *expected], expected, expected)


def _refuses(prompt: list[int], expected: list[int]) -> Appended:
    raise TemplateUnsupported("no")


def _breaks(prompt: list[int], expected: list[int]) -> Appended:
    raise KeyError("role")


@pytest.mark.parametrize(
    "answer, blind_answer, verdict, without_history",
    [
        (_right, _right, Verdict.EXACT, Verdict.EXACT),
        (_right, _refuses, Verdict.EXACT, Verdict.REFUSED),
        (_right, _one_too_few, Verdict.WRONG, Verdict.WRONG),
        (_refuses, _right, Verdict.REFUSED, Verdict.EXACT),
        (_refuses, _one_too_many, Verdict.WRONG, Verdict.WRONG),
        *[
            (wrong, _right, Verdict.WRONG, Verdict.EXACT)
            for wrong in (_one_too_few, _one_too_many, _prompt_touched, _parts_do_not_add_up, _breaks)
        ],
    ],
)
def test_the_judge(
    matrix: Matrix, answer: Answer, blind_answer: Answer, verdict: Verdict, without_history: Verdict
) -> None:
    real = matrix.trial(PAIRINGS[0])
    turn = real.turn(SHAPES[0], "none")
    stub: Any = _Stub(real.oracle.appended(turn.behind, ""), answer, blind_answer)
    outcome = replace(real, subject=stub).outcome(Cell(PAIRINGS[0], SHAPES[0], "length", "none"))
    assert (outcome.verdict, outcome.without_history) == (verdict, without_history), outcome.detail
