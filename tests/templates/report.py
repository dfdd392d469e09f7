"""Counts the exact cells of the matrix, by family and kind of conversation.

python -m tests.templates.report           prints the full table, and the cells that are not exact
python -m tests.templates.report --write   writes the short table into docs/templates.md
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.templates.families import FAMILIES
from tests.templates.matrix import Matrix, Outcome, Verdict, describe
from tests.templates.shapes import SHAPES

PAGE = Path(__file__).parents[2] / "docs" / "templates.md"
BEGIN, END = "<!-- templates: made by `make templates` -->", "<!-- end of templates -->"


@dataclass(frozen=True)
class Report:
    """The outcomes of the matrix, counted."""

    outcomes: list[Outcome]

    def counts(self, family: str = "", group: str = "") -> Counter[Verdict]:
        """Number of cells by verdict; of one family or group of conversations, or (the default) of all."""
        return Counter(
            outcome.verdict
            for outcome in self.outcomes
            if family in ("", outcome.cell.pairing.template.family.name)
            and group in ("", outcome.cell.shape.group)
        )

    @property
    def refused_share(self) -> float:
        """The share of refused cells among those that are not excluded."""
        return share(self.counts(), Verdict.REFUSED)

    def without_history(self) -> Counter[Verdict]:
        """Number of cells by the verdict on the same call without history."""
        return Counter(outcome.without_history for outcome in self.outcomes)

    def markdown(self) -> str:
        """A table with a row for each family and a column for each group of conversations."""
        groups = list(dict.fromkeys(shape.group for shape in SHAPES))
        rows = {family.name: family.name for family in FAMILIES} | {"all": ""}
        entries = [
            [title, *(_entry(self.counts(family, group)) for group in [*groups, ""])]
            for title, family in rows.items()
        ]
        lines = [_line(row) for row in (["family", *groups, "all"], ["---"] * (len(groups) + 2), *entries)]
        without_history = self.without_history()
        return "\n".join(
            [
                *lines,
                "",
                f"Refused: {self.refused_share:.1%}. "
                f"Without history: {without_history[Verdict.EXACT]} exact, "
                f"{without_history[Verdict.REFUSED]} refused, {without_history[Verdict.WRONG]} wrong.",
            ]
        )

    def summary(self) -> str:
        """A short table for the docs, with a row for each family and a column for each verdict."""
        rows = {family.name: family.name for family in FAMILIES} | {"all": ""}
        verdicts = (Verdict.EXACT, Verdict.REFUSED, Verdict.WRONG, Verdict.EXCLUDED)
        lines = [_line(["family", *map(str, verdicts)]), _line(["---", *["---:"] * len(verdicts)])]
        for title, family in rows.items():
            counts = self.counts(family)
            lines.append(_line([title, *(str(counts[verdict]) for verdict in verdicts)]))
        return "\n".join(lines)


def put_into(page: str, summary: str) -> str:
    """The page with the text between the two HTML comments replaced by `summary`."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{summary}\n{END}{after}"


def report(log: Callable[[str], object] = lambda line: None) -> Report:
    """Run the whole matrix. Passes a description of the cells that are not exact to `log`."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes = Matrix(Path(folder)).all_outcomes()
    for verdict in (Verdict.WRONG, Verdict.REFUSED):
        log(describe(outcomes, verdict))
    return Report(outcomes)


def share(counts: Counter[Verdict], verdict: Verdict) -> float:
    """The share of cells with a verdict among those that are not excluded."""
    tried = counts.total() - counts[Verdict.EXCLUDED]
    return counts[verdict] / tried if tried else 0.0


def _entry(counts: Counter[Verdict]) -> str:
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])


def _line(entries: list[str]) -> str:
    return f"| {' | '.join(entries)} |"


def main() -> None:
    """Print the full table, and the cells that are not exact; or write the short table into the docs."""
    counted = report(lambda line: print(line, file=sys.stderr))
    if "--write" in sys.argv:
        PAGE.write_text(put_into(PAGE.read_text(), counted.summary()))
    else:
        print(counted.markdown())


if __name__ == "__main__":
    main()
