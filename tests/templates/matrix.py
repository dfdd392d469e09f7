"""The matrix: template x conversation x ending x template arguments, with a verdict for each cell.

A cell is exact, refused (a typed error, although the oracle has an answer) or wrong. In an exact cell

    appended.prompt_ids == prompt_ids + appended.close_ids + appended.suffix_ids

and the ids after `prompt_ids` equal those of the oracle. Without history, the same call must be exact or
refused.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from tests.templates.exclusions import EXCLUDED
from tests.templates.families import KWARGS, kwargs_of
from tests.templates.oracle import Oracle
from tests.templates.pairing import PAIRINGS, Pairing, save_tokenizer
from tests.templates.sampling import ENDINGS, Sampled, Turn, applies, sampled_ids
from tests.templates.shapes import SHAPES, TOOLS, Message, Shape
from tokenization import Appended, ChatTokenizer, TokenizationError

_CUT_WITH_EVERY_KWARGS = ("content", "call")
"""Names of the conversations that also end with "length" under each template argument."""


class Verdict(StrEnum):
    """The result of a cell."""

    EXACT = "exact"
    REFUSED = "refused"
    WRONG = "wrong"
    EXCLUDED = "excluded"
    UNCHECKED = "unchecked"
    """Excluded, but answered, and nothing tells whether the answer is right."""


@dataclass(frozen=True)
class Cell:
    """One call of `append`."""

    pairing: Pairing
    shape: Shape
    ending: str
    """A key of `ENDINGS`."""
    kwargs: str
    """A key of `KWARGS`."""

    def __str__(self) -> str:
        return f"{self.pairing.name} | {self.shape.name} | {self.ending} | {self.kwargs}"


@dataclass(frozen=True)
class Outcome:
    """The verdict on a cell, and the reason."""

    cell: Cell
    verdict: Verdict
    detail: str = ""
    without_history: Verdict = Verdict.EXCLUDED
    """The verdict on the same call with `history=None`."""


@dataclass
class Trial:
    """Runs all cells of one pairing. Cells share the renderings of the oracle."""

    pairing: Pairing
    oracle: Oracle
    subject: ChatTokenizer
    """The tokenizer under test."""
    _turns: dict[tuple[str, str], Turn] = field(default_factory=dict)

    @classmethod
    def start(cls, pairing: Pairing, folder: Path) -> "Trial":
        """Write the pairing's tokenizer to a folder and load it from there."""
        reference = save_tokenizer(pairing, folder)
        return cls(pairing, Oracle(pairing.template, reference), ChatTokenizer.load(folder))

    def cells(self) -> Iterator[Cell]:
        """Every cell of the pairing, the excluded ones too."""
        kwargs_names = kwargs_of(self.pairing.template) if self.pairing.tokenizer == "bytes" else ["none"]
        for shape in SHAPES:
            for name in kwargs_names:
                for ending in _endings(shape, name):
                    if applies(ending, shape, self.oracle, KWARGS[name]):
                        yield Cell(self.pairing, shape, ending, name)

    def outcomes(self) -> list[Outcome]:
        before = repr((SHAPES, TOOLS))
        outcomes = [self.outcome(cell) for cell in self.cells()]
        assert repr((SHAPES, TOOLS)) == before, "append changed the messages or tools it was given"
        return outcomes

    def outcome(self, cell: Cell) -> Outcome:
        """Call `append` for a cell, with and without history, and compare the ids with the oracle's."""
        if excluded := EXCLUDED.get((self.pairing.template.name, cell.shape.name)):
            return Outcome(cell, Verdict.EXCLUDED, excluded[1])
        turn = self.turn(cell.shape, cell.kwargs)
        sampled = ENDINGS[cell.ending](turn)
        prompt_ids = turn.prompt_ids + sampled_ids(sampled.text, str(cell), self.oracle)
        expected = self.oracle.appended(turn.after, sampled.sampled_close)
        verdict, detail = self._judge(cell, sampled, prompt_ids, expected, sampled.history)
        verdict_without_history, detail_without_history = self._judge(
            cell, sampled, prompt_ids, expected, None
        )
        if verdict_without_history is Verdict.WRONG and verdict is not Verdict.WRONG:
            return Outcome(
                cell, Verdict.WRONG, f"without history: {detail_without_history}", verdict_without_history
            )
        return Outcome(cell, verdict, detail, verdict_without_history)

    def turn(self, shape: Shape, kwargs_name: str) -> Turn:
        """The conversation at the moment of sampling. Raises: as `Oracle.after_turn`."""
        key = (shape.name, kwargs_name)
        if key not in self._turns:
            kwargs = KWARGS[kwargs_name]
            self._turns[key] = Turn(self.oracle, shape, kwargs, self.oracle.after_turn(shape, kwargs))
        return self._turns[key]

    def _judge(
        self,
        cell: Cell,
        sampled: Sampled,
        prompt_ids: list[int],
        expected: list[int],
        history: list[Message] | None,
    ) -> tuple[Verdict, str]:
        id_of = self.oracle.tokenizer.convert_tokens_to_ids
        kwargs = dict(KWARGS[cell.kwargs])
        options: dict[str, Any] = {
            "add_generation_prompt": kwargs.pop("add_generation_prompt", True),
            "history": history,
            "tools": TOOLS if cell.shape.with_tools else None,
            "finish_reason": sampled.finish_reason,
            "stop_reason": sampled.stop_reason(self.pairing.template.family.eos, id_of),
            "template_kwargs": kwargs,
        }
        try:
            appended = self.subject.append(list(prompt_ids), cell.shape.new, **options)
        except TokenizationError as error:
            return Verdict.REFUSED, f"{type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001 - the boundary: an untyped error is a finding, not a crash
            return Verdict.WRONG, f"raised {error!r}"
        error_text = self._error_in(appended, prompt_ids, expected)
        return (Verdict.WRONG, error_text) if error_text else (Verdict.EXACT, "")

    def _error_in(self, appended: Appended, prompt_ids: list[int], expected: list[int]) -> str:
        """A description of the first error in a result; empty if there is none."""
        if appended.prompt_ids[: len(prompt_ids)] != prompt_ids:
            return "the given ids are not a prefix of the next prompt"
        new_ids = appended.prompt_ids[len(prompt_ids) :]
        if new_ids != [*appended.close_ids, *appended.suffix_ids]:
            return "close_ids and suffix_ids are not the ids that were appended"
        if new_ids == expected:
            return ""
        new_text, expected_text = self.oracle.decode(new_ids), self.oracle.decode(expected)
        if new_text == expected_text:
            return f"the right text in other ids: {new_ids} instead of {expected}"
        return f"appended {new_text!r} instead of {expected_text!r}"


@dataclass
class Matrix:
    """The trials of all pairings. Each pairing runs once."""

    folder: Path
    """The folder for the tokenizers of the pairings."""
    _trials: dict[str, Trial] = field(default_factory=dict)
    _outcomes: dict[str, list[Outcome]] = field(default_factory=dict)

    def trial(self, pairing: Pairing) -> Trial:
        if pairing.name not in self._trials:
            self._trials[pairing.name] = Trial.start(pairing, self.folder / pairing.name)
        return self._trials[pairing.name]

    def outcomes(self, pairing: Pairing) -> list[Outcome]:
        if pairing.name not in self._outcomes:
            self._outcomes[pairing.name] = self.trial(pairing).outcomes()
        return self._outcomes[pairing.name]

    def all_outcomes(self) -> list[Outcome]:
        return [outcome for pairing in PAIRINGS for outcome in self.outcomes(pairing)]


def _endings(shape: Shape, kwargs_name: str) -> list[str]:
    if kwargs_name == "none":
        return list(ENDINGS)
    return ["own stop", "length"] if shape.name in _CUT_WITH_EVERY_KWARGS else ["own stop"]


def describe(outcomes: list[Outcome], verdict: Verdict, limit: int = 12) -> str:
    """The first `limit` cells with a verdict, and the reasons, as text for a failure message."""
    entries = [f"{outcome.cell}\n    {outcome.detail}" for outcome in outcomes if outcome.verdict is verdict]
    rest = [f"... and {len(entries) - limit} more"] if len(entries) > limit else []
    return "\n".join([f"{len(entries)} cells {verdict}:", *entries[:limit], *rest])
