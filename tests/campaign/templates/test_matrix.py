"""The whole matrix, and what makes it credible: `tests/unit/templates` has texts written by hand."""

import pytest

from tests.support.templates.corpus import sample
from tests.support.templates.families import FAMILY_OF, template_files
from tests.support.templates.matrix import trial
from tests.support.templates.oracle import Undecided
from tests.support.templates.pairing import Pairing, real_pairings, sentencepiece, trl_pairings
from tests.support.templates.report import PAGE, table
from tests.support.templates.shapes import SHAPES
from tests.support.templates.verdicts import FINDINGS, Verdict, describe

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
