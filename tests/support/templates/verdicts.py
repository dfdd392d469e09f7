"""The verdicts on calls of `append`."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """The verdict on one call."""

    EXACT = "exact"
    REFUSED = "refused"
    """A typed error, although the oracle has an answer."""
    WRONG = "wrong"
    EXCLUDED = "excluded"
    """The oracle has no answer; `append` raises a typed error or answers as for a simpler conversation."""
    UNCHECKED = "unchecked"
    """The oracle has no answer, `append` has one, and nothing tells whether it is right."""


FINDINGS = (Verdict.WRONG, Verdict.UNCHECKED)
"""The verdicts that no cell may have."""


@dataclass(frozen=True)
class Finding:
    """A verdict and its reason."""

    verdict: Verdict
    kind: str = ""
    """What is wrong, a `Kind`; why the cell is excluded, a `Reason`; or the name of the error."""
    detail: str = ""


@dataclass(frozen=True)
class Result:
    """The finding on one cell, with or without history."""

    group: str
    """The row of the table that counts this cell."""
    pairing: str
    shape: str
    ending: str
    variables: str
    history: bool
    """Whether `append` was given the history."""
    finding: Finding

    @property
    def verdict(self) -> Verdict:
        return self.finding.verdict

    @property
    def cell(self) -> str:
        history = "with history" if self.history else "without history"
        return f"{self.pairing} | {self.shape} | {self.ending} | {self.variables} | {history}"


def describe(results: list[Result], verdicts: tuple[Verdict, ...]) -> str:
    """The first cells with one of the verdicts, and the reasons, as text for a failure message."""
    entries = [
        f"{result.cell}\n    {result.verdict}: {result.finding.kind}\n    {result.finding.detail}"
        for result in results
        if result.verdict in verdicts
    ]
    return "\n".join([f"{len(entries)} cells, the first of them:", *entries[:12]])
