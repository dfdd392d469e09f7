"""A small and diverse sample of the fetched templates, for the tests.

Each template of the list has the most fields, filters, tests, variables and constants that no template before
it has.
"""

from pathlib import Path

SAMPLE_FILE = Path(__file__).with_name("sample.txt")


def sample_names() -> list[str]:
    """Names of the templates in the sample, the most diverse first."""
    return SAMPLE_FILE.read_text("utf-8").split()
