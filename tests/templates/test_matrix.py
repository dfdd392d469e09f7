from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.templates.matrix import Cell, Matrix, Verdict, describe
from tests.templates.pairing import EVERY_PAIRING, PAIRINGS, Pairing
from tests.templates.report import PAGE, Report, put_into
from tests.templates.shapes import SHAPES
from tokenization import Appended, TemplateUnsupported

_MAX_REFUSED_SHARE = 0.03


@EVERY_PAIRING
def test_no_cell_is_wrong(matrix: Matrix, pairing: Pairing) -> None:
    outcomes = matrix.outcomes(pairing)
    assert Verdict.WRONG not in {outcome.verdict for outcome in outcomes}, describe(outcomes, Verdict.WRONG)


@pytest.mark.slow
def test_few_cells_are_refused(matrix: Matrix) -> None:
    """A refusal is never wrong, so without this test a package that refuses everything would pass."""
    report = Report(matrix.all_outcomes())
    refused = describe(report.outcomes, Verdict.REFUSED)
    assert report.refused_share < _MAX_REFUSED_SHARE, f"{report.markdown()}\n{refused}"


@pytest.mark.slow
def test_docs_have_the_current_table(matrix: Matrix) -> None:
    """If this fails, run `make templates`."""
    page = PAGE.read_text()
    assert put_into(page, Report(matrix.all_outcomes()).summary()) == page


Answer = Callable[[list[int], list[int]], Appended]
"""Takes the given ids and the expected new ids; returns the answer of the stub."""


@dataclass
class _Stub:
    """A tokenizer with a given answer, right or wrong, to test the verdicts."""

    expected: list[int]
    answer: Answer
    answer_without_history: Answer

    def append(self, prompt_ids: list[int], _new: object, *, history: object, **_options: Any) -> Appended:
        return (self.answer_without_history if history is None else self.answer)(prompt_ids, self.expected)


def _right(prompt: list[int], expected: list[int]) -> Appended:
    return Appended([*prompt, *expected], expected[:1], expected[1:])


def _one_too_few(prompt: list[int], expected: list[int]) -> Appended:
    return Appended([*prompt, *expected[1:]], [], expected[1:])


def _one_too_many(prompt: list[int], expected: list[int]) -> Appended:
    return Appended([*prompt, expected[0], *expected], expected[:1], expected)


def _prompt_changed(prompt: list[int], expected: list[int]) -> Appended:
    return Appended([*prompt[:-1], prompt[-1] + 1, *expected], [], expected)


def _ids_do_not_add_up(prompt: list[int], expected: list[int]) -> Appended:
    return Appended([*prompt, *expected], expected, expected)


def _refuses(prompt: list[int], expected: list[int]) -> Appended:
    raise TemplateUnsupported("no")


def _breaks(prompt: list[int], expected: list[int]) -> Appended:
    raise KeyError("role")


@pytest.mark.parametrize(
    "answer, answer_without_history, verdict, without_history",
    [
        (_right, _right, Verdict.EXACT, Verdict.EXACT),
        (_right, _refuses, Verdict.EXACT, Verdict.REFUSED),
        (_right, _one_too_few, Verdict.WRONG, Verdict.WRONG),
        (_refuses, _right, Verdict.REFUSED, Verdict.EXACT),
        (_refuses, _one_too_many, Verdict.WRONG, Verdict.WRONG),
        *[
            (wrong, _right, Verdict.WRONG, Verdict.EXACT)
            for wrong in (_one_too_few, _one_too_many, _prompt_changed, _ids_do_not_add_up, _breaks)
        ],
    ],
)
def test_verdict_on_right_and_wrong_answers(
    matrix: Matrix, answer: Answer, answer_without_history: Answer, verdict: Verdict, without_history: Verdict
) -> None:
    trial = matrix.trial(PAIRINGS[0])
    turn = trial.turn(SHAPES[0], "none")
    stub: Any = _Stub(trial.oracle.appended(turn.after, ""), answer, answer_without_history)
    outcome = replace(trial, subject=stub).outcome(Cell(PAIRINGS[0], SHAPES[0], "length", "none"))
    assert (outcome.verdict, outcome.without_history) == (verdict, without_history), outcome.detail
