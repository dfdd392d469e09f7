"""The whole matrix, and what makes it credible: `tests/unit/templates` has texts written by hand."""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.templates.corpus import fetched_template
from tests.support.templates.families import FAMILY_OF, template_files
from tests.support.templates.laws import Kind
from tests.support.templates.matrix import Cell, Matrix
from tests.support.templates.oracle import Undecided
from tests.support.templates.pairing import Pairing, pairing, real_pairings, trl_pairings
from tests.support.templates.report import PAGE, table
from tests.support.templates.sample import sample_names
from tests.support.templates.sampling import Turn
from tests.support.templates.shapes import SHAPES
from tests.support.templates.verdicts import FINDINGS, Finding, Verdict, describe
from tokenization import Appended, TemplateUnsupported

_MAX_REFUSED_SHARE = 0.03
_REAL = ("qwen3", "gemma3")
"""Templates to run with the real tokenizer of their model, which takes ten times as long as a small one."""
_PAIRINGS = (
    *trl_pairings(),
    *(Pairing(fetched_template(name)) for name in sample_names()),
    *(each for each in real_pairings() if each.template.stem in _REAL),
)


@pytest.fixture(scope="session")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("templates"))


@pytest.mark.parametrize("pairing", _PAIRINGS, ids=lambda each: each.name)
def test_no_cell_is_wrong(matrix: Matrix, pairing: Pairing) -> None:
    results = matrix.results(pairing)
    assert not {result.verdict for result in results} & {*FINDINGS}, describe(results, FINDINGS)


def test_few_cells_are_refused(matrix: Matrix) -> None:
    """A refusal is never wrong, so without this test a package that refuses everything would pass."""
    results = [result for each in trl_pairings() for result in matrix.results(each) if result.history]
    refused = sum(result.verdict is Verdict.REFUSED for result in results)
    shown = sum(result.verdict is not Verdict.EXCLUDED for result in results)
    assert refused < _MAX_REFUSED_SHARE * shown, describe(results, (Verdict.REFUSED,))


def test_docs_have_the_current_rows_of_trl(matrix: Matrix) -> None:
    """If this fails, run `make templates`."""
    assert set(FAMILY_OF) == set(template_files())
    results = [result for each in trl_pairings() for result in matrix.results(each)]
    groups = {each.group for each in trl_pairings()}
    current = {line for line in table(results).splitlines() if line.split("|")[1].strip() in groups}
    assert current <= set(PAGE.read_text().splitlines())


@pytest.mark.parametrize("pairing", trl_pairings(), ids=lambda each: each.name)
def test_ids_after_a_turn_equal_those_of_the_whole_rendering(matrix: Matrix, pairing: Pairing) -> None:
    """The oracle encodes only the text after the turn; an engine encodes the whole rendering."""
    oracle = matrix.trial(pairing).oracle
    for shape in SHAPES:
        turn = matrix.trial(pairing).turn(shape, "none")
        if isinstance(turn, Undecided) or not oracle.added_tokens.match(turn.end.text):
            continue
        whole = oracle.render([*shape.history, *shape.new], shape, {})
        assert whole.endswith(turn.end.text), shape.name
        ids = turn.whole_end()
        assert oracle.encode(whole)[-len(ids) :] == ids, shape.name


def _refuses(prompt: list[int], expected: list[int]) -> Appended:
    raise TemplateUnsupported("no")


def _breaks(prompt: list[int], expected: list[int]) -> Appended:
    raise KeyError("role")


def _right(prompt: list[int], new: list[int]) -> Appended:
    return Appended(prompt + new, new[:1], new[1:])


def _one_too_many(prompt: list[int], expected: list[int]) -> Appended:
    return Appended([*prompt, expected[0], *expected], expected[:1], expected)


@pytest.mark.parametrize(
    "template, answer, verdict, kind",
    [
        ("qwen3", _right, Verdict.EXACT, ""),
        ("qwen3", _refuses, Verdict.REFUSED, "TemplateUnsupported"),
        ("qwen3", _breaks, Verdict.WRONG, Kind.UNTYPED_ERROR),
        ("qwen3", _one_too_many, Verdict.WRONG, Kind.BEFORE_NEW),
        ("qwen3", lambda prompt, new: Appended(prompt[1:] + new, [], new), Verdict.WRONG, Kind.PREFIX),
        ("qwen3", lambda prompt, new: Appended(prompt + new, new, new), Verdict.WRONG, Kind.SUM),
        # Gemma has no system role: without the system message it prints the same conversation
        ("gemma", _right, Verdict.EXCLUDED, None),
        ("gemma", _one_too_many, Verdict.UNCHECKED, None),
        ("gemma", _breaks, Verdict.WRONG, None),
    ],
)
def test_verdict_on_right_and_wrong_answers(
    matrix: Matrix, template: str, answer: Any, verdict: Verdict, kind: str | None
) -> None:
    trial = matrix.trial(pairing(template))
    turn = trial.turn(SHAPES[0], "none")
    assert isinstance(turn, Turn)
    stub = Mock(append=lambda prompt_ids, *_new, **_options: answer(prompt_ids, turn.whole_end()))
    shown = template == "qwen3"
    for result in replace(trial, subject=stub).judge(Cell(SHAPES[0 if shown else 1], "length", "none")):
        finding = Finding(result.verdict, result.finding.kind if shown else "")
        assert finding == Finding(verdict, kind or ""), result.finding
