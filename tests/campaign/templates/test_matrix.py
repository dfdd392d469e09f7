"""The whole matrix, and what makes it credible: `tests/unit/templates` has texts written by hand."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from chat_tokenizer import Appended, TemplateUnsupported
from tests.support.templates.corpus import sample
from tests.support.templates.families import FAMILY_OF, template_files
from tests.support.templates.matrix import Cell, trial
from tests.support.templates.oracle import Undecided
from tests.support.templates.pairing import Pairing, pairing, real_pairings, sentencepiece, trl_pairings
from tests.support.templates.report import PAGE, table
from tests.support.templates.sampling import Turn
from tests.support.templates.shapes import SHAPES
from tests.support.templates.verdicts import FINDINGS, Finding, Kind, Verdict, describe

_MAX_REFUSED_SHARE = 0.03
_REAL = ("qwen3", "gemma3")
"""Templates to run with the real tokenizer of their model, which takes ten times as long as a small one."""
_PAIRINGS = (
    *trl_pairings(),
    *map(Pairing, sample()),
    *(each for each in real_pairings() if each.template.stem in _REAL),
    *sentencepiece(),
)


@pytest.mark.parametrize("pairing", _PAIRINGS, ids=lambda each: each.name)
def test_no_cell_is_wrong(pairing: Pairing) -> None:
    results = trial(pairing).results
    assert not {result.verdict for result in results} & {*FINDINGS}, describe(results, FINDINGS)


def test_few_cells_are_refused() -> None:
    """A refusal is never wrong, so without this test a package that refuses everything would pass."""
    results = [result for each in trl_pairings() for result in trial(each).results if result.history]
    refused = sum(result.verdict is Verdict.REFUSED for result in results)
    shown = sum(result.verdict is not Verdict.EXCLUDED for result in results)
    assert refused < _MAX_REFUSED_SHARE * shown, describe(results, (Verdict.REFUSED,))


def test_docs_have_the_current_rows_of_trl() -> None:
    """If this fails, run `make templates`."""
    assert set(FAMILY_OF) == set(template_files())
    results = [result for each in trl_pairings() for result in trial(each).results]
    groups = {each.group for each in trl_pairings()}
    current = {line for line in table(results).splitlines() if line.split("|")[1].strip() in groups}
    assert current <= set(PAGE.read_text().splitlines())


@pytest.mark.parametrize("pairing", trl_pairings(), ids=lambda each: each.name)
def test_ids_after_a_turn_equal_those_of_the_whole_rendering(pairing: Pairing) -> None:
    """The oracle encodes only the text after the turn; an engine encodes the whole rendering."""
    oracle = trial(pairing).oracle
    for shape in SHAPES:
        turn = trial(pairing).turn(shape, "none")
        if isinstance(turn, Undecided) or not oracle.renderer.added_tokens.match(turn.end.text):
            continue
        whole = oracle.render([*shape.history, *shape.new], shape, {})
        assert whole.endswith(turn.end.text), shape.name
        ids = turn.whole_end()
        assert oracle.encode(whole)[-len(ids) :] == ids, shape.name


def _refuses(prompt: list[int], expected: list[int]) -> Appended:
    raise TemplateUnsupported("no")


def _breaks(prompt: list[int], expected: list[int]) -> Appended:
    raise KeyError("role")


def _answer(prompt_ids: list[int], close_ids: list[int], suffix_ids: list[int]) -> Any:
    return SimpleNamespace(prompt_ids=prompt_ids, close_ids=close_ids, suffix_ids=suffix_ids, notes=())


def _right(prompt: list[int], new: list[int]) -> Any:
    return _answer(prompt + new, new[:1], new[1:])


def _one_too_many(prompt: list[int], expected: list[int]) -> Any:
    return _answer([*prompt, expected[0], *expected], expected[:1], expected)


@pytest.mark.parametrize(
    "template, answer, verdict, kind",
    [
        ("qwen3", _right, Verdict.EXACT, ""),
        ("qwen3", _refuses, Verdict.REFUSED, "TemplateUnsupported"),
        ("qwen3", _breaks, Verdict.WRONG, Kind.UNTYPED_ERROR),
        ("qwen3", lambda prompt, new: _answer(prompt, [], []), Verdict.WRONG, Kind.OTHER_IDS),
        ("qwen3", _one_too_many, Verdict.WRONG, Kind.OTHER_IDS),
        ("qwen3", lambda prompt, new: _answer(prompt[1:] + new, [], new), Verdict.WRONG, Kind.PREFIX),
        ("qwen3", lambda prompt, new: _answer(prompt + new, new, new), Verdict.WRONG, Kind.SUM),
        # Gemma has no system role: without the system message it prints the same conversation
        ("gemma", _right, Verdict.EXCLUDED, None),
        ("gemma", _one_too_many, Verdict.UNCHECKED, None),
        ("gemma", _breaks, Verdict.WRONG, None),
    ],
)
def test_verdict_on_right_and_wrong_answers(
    template: str, answer: Any, verdict: Verdict, kind: str | None
) -> None:
    subject = trial(pairing(template))
    turn = subject.turn(SHAPES[0], "none")
    assert isinstance(turn, Turn)
    stub = Mock(append=lambda prompt_ids, *_new, **_options: answer(prompt_ids, turn.whole_end()))
    shown = template == "qwen3"
    for result in replace(subject, subject=stub).judge(Cell(SHAPES[0 if shown else 1], "length", "none")):
        finding = Finding(result.verdict, result.finding.kind if shown else "")
        assert finding == Finding(verdict, kind or ""), result.finding
