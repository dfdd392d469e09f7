"""How many cells of the matrix come out exact, by family and kind of conversation.

python -m tests.templates.report            prints the tables, and what is not exact
python -m tests.templates.report --write   puts the short one into docs/templates.md
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.templates.families import FAMILIES
from tests.templates.matrix import Matrix, Outcome, Verdict, complaints
from tests.templates.shapes import SHAPES

PAGE = Path(__file__).parents[2] / "docs" / "templates.md"
BEGIN, END = "<!-- templates: made by `make templates` -->", "<!-- end of templates -->"


@dataclass(frozen=True)
class Report:
    """The outcomes of the matrix, counted."""

    outcomes: list[Outcome]

    def counts(self, family: str = "", group: str = "") -> Counter[Verdict]:
        """Cells by verdict, of all families and groups or of one."""
        return Counter(
            outcome.verdict
            for outcome in self.outcomes
            if family in ("", outcome.cell.pairing.template.family.name)
            and group in ("", outcome.cell.shape.group)
        )

    @property
    def refused_share(self) -> float:
        """Refused cells of those that are not excluded."""
        return share(self.counts(), Verdict.REFUSED)

    def without_history(self) -> Counter[Verdict]:
        """The same cells by what becomes of them without history."""
        return Counter(outcome.without_history for outcome in self.outcomes)

    def markdown(self) -> str:
        """A table of families and groups of conversations."""
        groups = list(dict.fromkeys(shape.group for shape in SHAPES))
        rows = {family.name: family.name for family in FAMILIES} | {"all": ""}
        entries = [
            [title, *(_entry(self.counts(family, group)) for group in [*groups, ""])]
            for title, family in rows.items()
        ]
        lines = [_line(row) for row in (["family", *groups, "all"], ["---"] * (len(groups) + 2), *entries)]
        blind = self.without_history()
        return "\n".join(
            [
                *lines,
                "",
                f"Refused: {self.refused_share:.1%}. Without history: {blind[Verdict.EXACT]} exact, "
                f"{blind[Verdict.REFUSED]} refused, {blind[Verdict.WRONG]} wrong.",
            ]
        )

    def summary(self) -> str:
        """A short table for the docs: families, and all kinds of conversation together."""
        rows = {family.name: family.name for family in FAMILIES} | {"all": ""}
        verdicts = (Verdict.EXACT, Verdict.REFUSED, Verdict.WRONG, Verdict.EXCLUDED)
        lines = [_line(["family", *map(str, verdicts)]), _line(["---", *["---:"] * len(verdicts)])]
        for title, family in rows.items():
            counts = self.counts(family)
            lines.append(_line([title, *(str(counts[verdict]) for verdict in verdicts)]))
        return "\n".join(lines)


def put_into(page: str, summary: str) -> str:
    """The page with the table between its marks replaced."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{summary}\n{END}{after}"


def report(say: Callable[[str], object] = lambda line: None) -> Report:
    """Run the whole matrix. `say` is told which cells are not exact."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes = Matrix(Path(folder)).all_outcomes()
    for verdict in (Verdict.WRONG, Verdict.REFUSED):
        say(complaints(outcomes, verdict))
    return Report(outcomes)


def share(counts: Counter[Verdict], verdict: Verdict) -> float:
    """The part of the cells that are not excluded that has a verdict."""
    tried = counts.total() - counts[Verdict.EXCLUDED]
    return counts[verdict] / tried if tried else 0.0


def _entry(counts: Counter[Verdict]) -> str:
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])


def _line(entries: list[str]) -> str:
    return f"| {' | '.join(entries)} |"


def main() -> None:
    """Print the table, and what is not exact; or put the short table into the page of templates."""
    counted = report(lambda line: print(line, file=sys.stderr))
    if "--write" in sys.argv:
        PAGE.write_text(put_into(PAGE.read_text(), counted.summary()))
    else:
        print(counted.markdown())


if __name__ == "__main__":
    main()
