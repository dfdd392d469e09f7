"""Benchmark: the time of the proof that a chat template is local. `--help` describes the measurement."""

import argparse
import importlib.metadata
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # for a program that is run by its path, Python searches its folder; this package is in the parent folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from benchmarks.command import LINUX_ONLY, fail, make_parser, print_results, progress
from benchmarks.processes import other_programs_s
from benchmarks.report import machine, machine_lines, percentile, table, verdict
from tokenization import ChatTokenizer, TokenizationError
from tokenization.locality import Locality, Proof

_DESCRIPTION = """\
Measure the CPU time in which `ChatTokenizer.prove` finds out how much of a history decides what a chat
template appends. It runs once for each template of a machine; its result is kept in a file.

The templates are those of the package trl and those in a folder; equal ones are proved once. Their models
are not needed: the vocabulary is empty, and whatever is spelled like a special token is one.

  new messages   only the new messages decide what is appended.
  last turn      so do the calls of the last turn.
  whole history  more may decide: `append` renders the whole conversation as text.

The aim: 99 of 100 proofs take at most 3 s. A missed aim does not change the exit code: machines differ.
Linux only: it reads /proc.
"""

_EXAMPLES = """\
examples:
  python benchmarks/proofs.py                  the templates of trl and those in .cache/templates
  python benchmarks/proofs.py FOLDER           the templates of trl and those in another folder
  python benchmarks/proofs.py --quick          check that it runs: three templates
  python benchmarks/proofs.py --json out.json  also write the proof of every template to a file
"""

FETCHED = Path(__file__).resolve().parent.parent / ".cache" / "templates"
P99_S = 3.0
"""Aim: the 99th percentile of the CPU seconds of a proof."""
_QUICK_COUNT, _SLOWEST_COUNT = 3, 5
_SPECIAL = re.compile(
    # <|im_end|>, the same with full-width bars, <|turn>, <turn|>
    r"<[|\uff5c][^<>\s'\"{}]{1,40}>|<[a-z_]+\|>"
    # <s>, <end_of_turn>, <SPECIAL_12>, [/INST]
    r"|</?s>|<[be]os>|<(?:start|end|beginning)_of_[a-z]+>|<(?:BOS|EOS)_TOKEN>|<[A-Za-z]+_\d+>|\[/?[A-Z_]+\]"
)
_STOPS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|eot|>", "<|return|>", "<|endoftext|>")


@dataclass(frozen=True, slots=True)
class Timed:
    """The proof of one template."""

    name: str
    cpu_s: float
    proof: Proof


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = _parser().parse_args(argv)
    if sys.platform != "linux":
        return fail("proofs.py", LINUX_ONLY)
    if options.folder is not None and not options.folder.is_dir():
        return fail("proofs.py", f"{options.folder} is not a folder")
    templates = read_templates(options.folder or FETCHED)
    if not templates:
        return fail(
            "proofs.py", "no templates: install the package trl, or name a folder that holds .jinja files"
        )
    if options.quick:
        templates = dict(list(templates.items())[:_QUICK_COUNT])
    start, other_programs_before_s = time.monotonic(), other_programs_s()
    try:
        proofs = prove_all(templates)
    except TokenizationError as error:
        return fail("proofs.py", str(error))
    cores_s = len(os.sched_getaffinity(0)) * (time.monotonic() - start)
    others = (other_programs_s() - other_programs_before_s) / cores_s
    about = {**machine(("jinja2", "transformers")), "others": f"{others:.0%}"}
    print_results(as_text(proofs, about), as_json(proofs, about), options.json)
    return 0


def read_templates(folder: Path) -> dict[str, str]:
    """The templates of trl and all `.jinja` files below a folder: sources by name, equal ones once."""
    files = importlib.metadata.files("trl") or []
    paths = [Path(str(file.locate())) for file in files if file.match("trl/chat_templates/*.jinja")]
    named = {f"trl/{path.stem}": path for path in sorted(paths)}
    named |= {str(path.relative_to(folder).with_suffix("")): path for path in sorted(folder.rglob("*.jinja"))}
    by_text: dict[str, str] = {}
    for name, path in named.items():
        by_text.setdefault(path.read_text("utf-8"), name)
    return {name: text for text, name in by_text.items()}


def prove_all(templates: dict[str, str]) -> list[Timed]:
    """Prove each template, and measure the CPU time.

    Raises:
        TokenizationError: a tokenizer cannot be made for a template.
    """
    proofs = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, source) in enumerate(templates.items()):
            progress(f"template {number + 1} of {len(templates)}: {name}")
            tokenizer = stand_in(source, Path(folder))
            before = time.thread_time()
            proof = tokenizer.prove()
            proofs.append(Timed(name, time.thread_time() - before, proof))
    return proofs


def stand_in(source: str, folder: Path) -> ChatTokenizer:
    """A tokenizer for a template without its model. Its files are written to `folder`.

    Raises:
        TokenizerUnavailable: the tokenizer cannot be loaded.
    """
    special = sorted(set(_SPECIAL.findall(source)))
    stop = next((stop for stop in _STOPS if stop in special), "</s>")
    backend = Tokenizer(models.BPE())
    every = dict.fromkeys(["<s>", stop, *special])
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in every])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=stop)
    tokenizer.save_pretrained(folder)
    return ChatTokenizer.load(folder, source)


def as_json(proofs: Sequence[Timed], about: dict[str, str]) -> dict[str, Any]:
    """All proofs, as JSON values."""
    return {
        "machine": about,
        "aims": {"p99_s": P99_S},
        "count": len(proofs),
        "cpu_s": _percentiles(proofs),
        "local": {"after messages": _locals(proofs, "messages"), "after results": _locals(proofs, "results")},
        "proofs": {
            timed.name: {
                "cpu_s": timed.cpu_s,
                "after_messages": timed.proof.after_messages,
                "after_results": timed.proof.after_results,
                "reason": timed.proof.reason,
            }
            for timed in proofs
        },
    }


def as_text(proofs: Sequence[Timed], about: dict[str, str]) -> str:
    """The results as Markdown tables, aligned for a terminal."""
    times = _percentiles(proofs)
    summary = [
        ["CPU seconds of a proof", *times, f"p99 <= {P99_S:g} s"],
        [f"{len(proofs)} templates", *(f"{value:.2f}" for value in times.values()), verdict(_met(times))],
    ]
    decides = [
        ["what decides, number of templates", *Locality],
        *(_decides_row(f"after {kind}", found) for kind, found in _found(proofs).items()),
    ]
    slowest = sorted(proofs, key=lambda timed: timed.cpu_s, reverse=True)[:_SLOWEST_COUNT]
    slow = [
        ["slowest proofs", "CPU s", "after messages", "after results"],
        *(
            [t.name, f"{t.cpu_s:.2f}", str(t.proof.after_messages), str(t.proof.after_results)]
            for t in slowest
        ),
    ]
    head = machine_lines(about, f"; other programs used {about['others']} of them")
    return "\n".join([*head, "", table(summary), "", table(decides), "", table(slow)])


def _percentiles(proofs: Sequence[Timed]) -> dict[str, float]:
    seconds = [timed.cpu_s for timed in proofs]
    return {"p50": percentile(seconds, 0.5), "p99": percentile(seconds, 0.99), "max": max(seconds)}


def _met(times: dict[str, float]) -> bool:
    return times["p99"] <= P99_S


def _found(proofs: Iterable[Timed]) -> dict[str, list[Locality]]:
    return {
        "messages": [timed.proof.after_messages for timed in proofs],
        "results": [timed.proof.after_results for timed in proofs],
    }


def _locals(proofs: Sequence[Timed], kind: str) -> int:
    return sum(locality is not Locality.HISTORY for locality in _found(proofs)[kind])


def _decides_row(name: str, found: Iterable[Locality]) -> list[str]:
    counts = Counter(found)
    return [name, *(str(counts[locality]) for locality in Locality)]


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(_DESCRIPTION, _EXAMPLES)
    folder_help = "where to look for .jinja files (default: .cache/templates)"
    parser.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help=folder_help)
    return parser


if __name__ == "__main__":
    sys.exit(main())
