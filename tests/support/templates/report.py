"""Runs the matrix, counts its cells and reports what is wrong, by template and kind.

python -m tests.support.templates.report  every template, the report into a file
python -m tests.support.templates.report --only qwen3  the templates with `qwen3` in their names
python -m tests.support.templates.report --write  every template, the table into docs/templates.md
"""

import argparse
import contextlib
import functools
import io
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support.templates.corpus import FETCHED
from tests.support.templates.families import FAMILIES
from tests.support.templates.matrix import Trial
from tests.support.templates.pairing import REAL_GROUP, Pairing, all_pairings
from tests.support.templates.verdicts import Result, Verdict

PAGE = Path(__file__).parents[3] / "docs" / "templates.md"
BEGIN, END = "<!-- templates: made by `make templates` -->", "<!-- end of templates -->"
OUTPUT = Path(tempfile.gettempdir()) / "matrix-report.txt"
_COLUMNS = (Verdict.EXACT, Verdict.REFUSED, Verdict.WRONG, Verdict.EXCLUDED)
_FINDINGS = (Verdict.WRONG, Verdict.UNCHECKED)
_EXAMPLES = 20
_PROGRESS_SECONDS = 10

Count = Counter[tuple[str, bool, Verdict]]
"""Number of cells by group, whether there was history, and verdict."""


def run_pairing(pairing: Pairing) -> list[Result]:
    """The results of one pairing."""
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        return Trial.start(pairing, Path(folder)).results()


def run(pairings: Sequence[Pairing], processes: int, log: Callable[[str], object]) -> list[Result]:
    """The results of all pairings, in their order; progress goes to `log`."""
    results: list[Result] = []
    began = reported = time.monotonic()
    # not forked: the tokenizers library has threads of its own
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for count, found in enumerate(pool.imap(run_pairing, pairings, chunksize=1), start=1):
            results += found
            if time.monotonic() - reported > _PROGRESS_SECONDS or count == len(pairings):
                reported = time.monotonic()
                wrong = sum(result.verdict is Verdict.WRONG for result in results)
                cells = f"{len(results)} cells, {wrong} wrong"
                log(f"{count} of {len(pairings)} templates, {cells}, {reported - began:.0f} s")
    return results


def count(results: Sequence[Result]) -> Count:
    """Number of cells by group, history and verdict. An unchecked cell counts as excluded."""
    counts: Count = Counter()
    for result in results:
        verdict = Verdict.EXCLUDED if result.verdict is Verdict.UNCHECKED else result.verdict
        counts[result.group, result.history, verdict] += 1
    return counts


def table(counts: Count) -> str:
    """A table for the docs with a row for each family of trl and each other source that has cells."""
    counted = {group for group, _, _ in counts}
    in_order = (*(family.name for family in FAMILIES), REAL_GROUP, *FETCHED)
    groups = [group for group in in_order if group in counted]
    sides = ("", "without history: ")
    header = ["templates", *(f"{side}{column}" for side in sides for column in _COLUMNS)]
    rows = [_row(group, [group], counts) for group in groups] + [_row("all", groups, counts)]
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def put_into(page: str, summary: str) -> str:
    """The page with the text between the two HTML comments replaced by `summary`."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{summary}\n{END}{after}"


def report(results: Sequence[Result]) -> str:
    """The findings as text: counts, then kinds with examples."""
    return "\n".join([*_totals(results), "", *_kinds(results)]) + "\n"


def _row(title: str, groups: Sequence[str], counts: Count) -> list[str]:
    cells = [(history, column) for history in (True, False) for column in _COLUMNS]
    return [title, *(str(sum(counts[group, *cell] for group in groups)) for cell in cells)]


def _where(history: bool) -> str:
    return f"{'with' if history else 'without'} history"


def _totals(results: Sequence[Result]) -> list[str]:
    lines = []
    for history in (True, False):
        counts = Counter(result.verdict for result in results if result.history is history)
        shown = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict)
        lines.append(f"{_where(history)}: {shown}")
    return lines


def _kinds(results: Sequence[Result]) -> list[str]:
    """What was found how often and in how many templates; of what is wrong or unchecked, a few examples."""
    kinds: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        if result.verdict is not Verdict.EXACT:
            kinds[f"{result.verdict}, {_where(result.history)}", result.finding.kind].append(result)
    lines = []
    for (verdict, kind), found in sorted(kinds.items(), key=lambda item: (item[0][0], -len(item[1]))):
        templates = {result.pairing for result in found}
        lines.append(f"{verdict}: {len(found)} cells in {len(templates)} templates: {kind}")
        if found[0].verdict in _FINDINGS:
            lines += [f"    {result.cell}\n        {result.finding.detail}" for result in found[:_EXAMPLES]]
    return lines


def main() -> None:
    """Run the chosen templates and write the report."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--only", default="", metavar="NAME", help="templates with NAME in their names")
    parser.add_argument("--write", action="store_true", help=f"write the table into docs/{PAGE.name} too")
    options = parser.parse_args()
    log = functools.partial(print, file=sys.stderr, flush=True)
    pairings = [pairing for pairing in all_pairings() if options.only.lower() in pairing.name.lower()]
    results = run(pairings, os.cpu_count() or 1, log)
    text = report(results)
    OUTPUT.write_text(text)
    if options.write:
        PAGE.write_text(put_into(PAGE.read_text(), table(count(results))))
    print(text + f"the report is in {OUTPUT}")


if __name__ == "__main__":
    main()
