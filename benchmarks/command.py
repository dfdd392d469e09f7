"""What the commands of the benchmarks have in common."""

import argparse
import sys


def make_parser(description: str, examples: str) -> argparse.ArgumentParser:
    """A parser whose help shows both texts as they are written."""
    kind = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, epilog=examples, formatter_class=kind)


def fail(program: str, message: str) -> int:
    """Print why a program cannot run; returns its exit code."""
    print(f"{program}: {message}", file=sys.stderr)
    return 2
