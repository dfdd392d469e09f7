"""Runs the matrix of corpus templates and reports what is wrong, by template and kind.

python -m tests.templates.corpus_report                       every template, to /tmp/matrix-report.txt
python -m tests.templates.corpus_report --only qwen3 --limit 5   five templates with `qwen3` in their names
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

from tests.templates.corpus import CorpusTemplate, corpus
from tests.templates.corpus_matrix import CorpusTrial, Result
from tests.templates.matrix import Verdict

OUTPUT = Path(tempfile.gettempdir()) / "matrix-report.txt"
_FINDINGS = (Verdict.WRONG, Verdict.UNCHECKED)
_EXAMPLES = 2
_PROGRESS_SECONDS = 10


def run_template(template: CorpusTemplate) -> list[Result]:
    """The results of one template."""
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        return CorpusTrial.start(template, Path(folder)).results()


def run(templates: Sequence[CorpusTemplate], processes: int, log: Callable[[str], object]) -> list[Result]:
    """The results of all templates, in their order; progress goes to `log`."""
    results: list[Result] = []
    began = reported = time.monotonic()
    # not forked: the tokenizers library has threads of its own
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for count, found in enumerate(pool.imap(run_template, templates, chunksize=1), start=1):
            results += found
            if time.monotonic() - reported > _PROGRESS_SECONDS or count == len(templates):
                reported = time.monotonic()
                wrong = sum(result.verdict is Verdict.WRONG for result in results)
                log(
                    f"{count} of {len(templates)} templates, {len(results)} cells, {wrong} wrong, "
                    f"{reported - began:.0f} s"
                )
    return results


def report(results: Sequence[Result], examples: int = _EXAMPLES) -> str:
    """The findings as text: counts, kinds over all templates, then kinds by template with examples."""
    return "\n".join([*_counts(results), "", *_kinds(results), "", *_by_template(results, examples)]) + "\n"


def _counts(results: Sequence[Result]) -> list[str]:
    lines = []
    for history in (True, False):
        counts = Counter(result.verdict for result in results if result.history is history)
        numbers = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict)
        lines.append(f"{'with' if history else 'without'} history: {numbers}")
    return lines


def _kinds(results: Sequence[Result]) -> list[str]:
    lines = []
    for verdict in (*_FINDINGS, Verdict.REFUSED, Verdict.EXCLUDED):
        for history in (True, False):
            chosen = [r for r in results if r.verdict is verdict and r.history is history]
            templates: dict[str, set[str]] = defaultdict(set)
            for result in chosen:
                templates[result.kind].add(result.template)
            where = "with" if history else "without"
            lines.append(f"{verdict}, {where} history: {len(chosen)} cells")
            for kind, count in Counter(result.kind for result in chosen).most_common():
                lines.append(f"    {count:6} in {len(templates[kind]):3} templates: {kind}")
    return lines


def _by_template(results: Sequence[Result], examples: int) -> list[str]:
    """Templates with the most findings first; in each the kinds, with examples."""
    groups: dict[str, dict[tuple[str, str, bool], list[Result]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        if result.verdict in _FINDINGS:
            groups[result.template][result.verdict, result.kind, result.history].append(result)
    lines = []
    for template, kinds in sorted(groups.items(), key=lambda item: -sum(map(len, item[1].values()))):
        lines.append(f"== {template}")
        for (verdict, kind, history), found in sorted(kinds.items(), key=lambda item: -len(item[1])):
            where = "with" if history else "without"
            lines.append(f"  {len(found)} {verdict} {where} history: {kind}")
            for result in found[:examples]:
                lines += [
                    f"      {result.shape} | {result.ending} | {result.variables}",
                    f"        {result.detail}",
                ]
    return lines


def chosen(only: str, limit: int | None, stride: bool = False) -> list[CorpusTemplate]:
    """The templates whose names contain `only`, at most `limit`; spread over all of them with `stride`."""
    templates = [template for template in corpus() if only.lower() in template.name.lower()]
    if limit is None or limit >= len(templates):
        return templates
    return templates[:: max(1, len(templates) // limit)][:limit] if stride else templates[:limit]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the chosen templates and write the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="NAME", help="templates with NAME in their names")
    parser.add_argument("--limit", type=int, metavar="N", help="at most N templates")
    parser.add_argument("--spread", action="store_true", help="take the N templates from all over the corpus")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--examples", type=int, default=_EXAMPLES, help="cells to show of each kind")
    parser.add_argument("--output", type=Path, default=OUTPUT, help=f"default: {OUTPUT}")
    options = parser.parse_args(arguments)
    templates = chosen(options.only, options.limit, options.spread)
    log = functools.partial(print, file=sys.stderr, flush=True)
    text = report(run(templates, options.processes, log), options.examples)
    options.output.write_text(text)
    print("\n".join(text.splitlines()[:60]))
    print(f"... the whole report is in {options.output}")


if __name__ == "__main__":
    main()
