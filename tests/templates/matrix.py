"""The matrix: template x conversation x ending x template arguments, and what becomes of each cell.

A cell is exact, refused (a typed error though the oracle has an answer) or wrong. In an exact cell

    out.prompt_ids == prompt_ids + out.close_ids + out.suffix_ids

and what follows `prompt_ids` is, id by id, what the oracle says. Without the history the same cell may be
refused, but must not come out otherwise.
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
"""Conversations that are also cut off under each template argument; the others end by themselves there."""


class Verdict(StrEnum):
    """What became of a cell."""

    EXACT = "exact"
    REFUSED = "refused"
    WRONG = "wrong"
    EXCLUDED = "excluded"


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
    """What became of a cell, and why."""

    cell: Cell
    verdict: Verdict
    detail: str = ""
    without_history: Verdict = Verdict.EXCLUDED
    """What becomes of the same call with `history=None`."""


@dataclass
class Trial:
    """Everything that is tried with one pairing. Renderings are kept and shared by its cells."""

    pairing: Pairing
    oracle: Oracle
    subject: ChatTokenizer
    """What is tested."""
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
        """Call `append` for a cell, with and without history, and judge."""
        if excluded := EXCLUDED.get((self.pairing.template.name, cell.shape.name)):
            return Outcome(cell, Verdict.EXCLUDED, excluded[1])
        turn = self.turn(cell.shape, cell.kwargs)
        sampled = ENDINGS[cell.ending](turn)
        prompt_ids = turn.prompt_ids + sampled_ids(sampled.text, str(cell), self.oracle)
        expected = self.oracle.appended(turn.behind, sampled.taken)
        verdict, detail = self._judge(cell, sampled, prompt_ids, expected, sampled.history)
        blind, blind_detail = self._judge(cell, sampled, prompt_ids, expected, None)
        if blind is Verdict.WRONG and verdict is not Verdict.WRONG:
            return Outcome(cell, Verdict.WRONG, f"without history: {blind_detail}", blind)
        return Outcome(cell, verdict, detail, blind)

    def turn(self, shape: Shape, kwargs_name: str) -> Turn:
        """The conversation at the moment of sampling. Raises: as `Oracle.behind`."""
        key = (shape.name, kwargs_name)
        if key not in self._turns:
            kwargs = KWARGS[kwargs_name]
            self._turns[key] = Turn(self.oracle, shape, kwargs, self.oracle.behind(shape, kwargs))
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
            out = self.subject.append(list(prompt_ids), cell.shape.new, **options)
        except TokenizationError as error:
            return Verdict.REFUSED, f"{type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001 - the boundary: an untyped error is a finding, not a crash
            return Verdict.WRONG, f"raised {error!r}"
        complaint = self._complaint(out, prompt_ids, expected)
        return (Verdict.WRONG, complaint) if complaint else (Verdict.EXACT, "")

    def _complaint(self, out: Appended, prompt_ids: list[int], expected: list[int]) -> str:
        """What is wrong with an answer; empty if nothing is."""
        if out.prompt_ids[: len(prompt_ids)] != prompt_ids:
            return "the ids given are not a prefix of the next prompt"
        appended = out.prompt_ids[len(prompt_ids) :]
        if appended != [*out.close_ids, *out.suffix_ids]:
            return "close_ids and suffix_ids are not what was appended"
        if appended == expected:
            return ""
        got, wanted = self.oracle.decode(appended), self.oracle.decode(expected)
        if got == wanted:
            return f"the right text in other ids: {appended} instead of {expected}"
        return f"appended {got!r} instead of {wanted!r}"


@dataclass
class Matrix:
    """All pairings. Each is tried once."""

    folder: Path
    """Where tokenizers are written."""
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


def complaints(outcomes: list[Outcome], verdict: Verdict, most: int = 12) -> str:
    """The cells with a verdict, and why, for a failure message."""
    found = [f"{outcome.cell}\n    {outcome.detail}" for outcome in outcomes if outcome.verdict is verdict]
    more = [f"... and {len(found) - most} more"] if len(found) > most else []
    return "\n".join([f"{len(found)} cells {verdict}:", *found[:most], *more])
