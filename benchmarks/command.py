"""What the commands of the benchmarks have in common: options, messages and output."""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LINUX_ONLY = "Linux only: it reads /proc"


def make_parser(description: str, examples: str, *, quick: bool = True) -> argparse.ArgumentParser:
    """A parser whose help shows both texts as they are written; it has --json and, if `quick`, --quick."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, epilog=examples, formatter_class=kind)
    if quick:
        parser.add_argument("--quick", action="store_true", help="only check that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every measurement to this file")
    return parser


def fail(program: str, message: str) -> int:
    """Print why a program cannot run; returns its exit code."""
    print(f"{program}: {message}", file=sys.stderr)
    return 2


def print_results(text: str, results: dict[str, Any], file: Path | None) -> None:
    """Print the tables; also write the results as JSON if the user named a file."""
    print(text)
    if file is not None:
        file.write_text(json.dumps(results, indent=1) + "\n")


def progress(step: str) -> None:
    """Report on stderr what is done next."""
    print(f"{step} ...", file=sys.stderr, flush=True)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for logs, stores and tokenizers that is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="tokenproxy-bench-") as folder:
        yield Path(folder)
