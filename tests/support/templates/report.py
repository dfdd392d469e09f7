"""Runs the matrix, counts its cells and reports what is wrong.

python -m tests.support.templates.report  every template
python -m tests.support.templates.report --only qwen3  the templates with `qwen3` in their names
python -m tests.support.templates.report --write  every template, the table into docs/templates.md
"""

import argparse
import contextlib
import io
import logging
import multiprocessing
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.support.templates.corpus import FETCHED
from tests.support.templates.families import FAMILIES
from tests.support.templates.matrix import Trial
from tests.support.templates.pairing import REAL_GROUP, Pairing, all_pairings
from tests.support.templates.verdicts import FINDINGS, Result, Verdict, describe

PAGE = Path(__file__).parents[3] / "docs" / "templates.md"
BEGIN, END = "<!-- templates: made by `make templates` -->", "<!-- end of templates -->"
_COLUMNS = (Verdict.EXACT, Verdict.REFUSED, Verdict.WRONG, Verdict.EXCLUDED)


def table(results: Sequence[Result]) -> str:
    """A table for the docs with a row for each family of trl and each other source that has cells."""
    counts: Counter[tuple[str, bool, Verdict]] = Counter()
    for result in results:
        verdict = Verdict.EXCLUDED if result.verdict is Verdict.UNCHECKED else result.verdict
        counts[result.group, result.history, verdict] += 1
        counts["all", result.history, verdict] += 1
    counted = {group for group, _, _ in counts}
    in_order = (*(family.name for family in FAMILIES), REAL_GROUP, *FETCHED, "all")
    header = ["templates", *(f"{side}{column}" for side in ("", "without history: ") for column in _COLUMNS)]
    cells = [(history, column) for history in (True, False) for column in _COLUMNS]
    rows = [[group, *(str(counts[group, *cell]) for cell in cells)] for group in in_order if group in counted]
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _run(pairing: Pairing) -> list[Result]:
    logging.disable(logging.WARNING)
    with contextlib.redirect_stderr(io.StringIO()):
        return Trial.start(pairing).results


def main() -> None:
    """Run the chosen templates and print the counts and the findings."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--only", default="", metavar="NAME", help="templates with NAME in their names")
    parser.add_argument("--write", action="store_true", help=f"write the table into docs/{PAGE.name} too")
    options = parser.parse_args()
    pairings = [pairing for pairing in all_pairings() if options.only.lower() in pairing.name.lower()]
    results: list[Result] = []
    # not forked: the tokenizers library has threads of its own
    with multiprocessing.get_context("spawn").Pool() as pool:
        for count, found in enumerate(pool.imap(_run, pairings), start=1):
            results += found
            print(f"\r{count} of {len(pairings)} templates", end="", file=sys.stderr, flush=True)
    print(f"\n{table(results)}\n\n{describe(results, FINDINGS)}")
    if options.write:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table(results)}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
