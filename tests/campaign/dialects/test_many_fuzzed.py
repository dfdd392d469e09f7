"""Thousands of fuzzed bodies for each format."""

import pytest

from tests.contract.dialects.test_fuzz import FUZZED, Fuzzed, send_fuzzed, strict  # noqa: F401 - a fixture
from tests.support.utils import Pair


@pytest.mark.parametrize("fuzzed", FUZZED.values(), ids=FUZZED)
def test_thousands_of_fuzzed_bodies(strict: Pair, fuzzed: Fuzzed) -> None:  # noqa: F811
    statuses = send_fuzzed(strict, fuzzed, 5000, seed=17)
    assert min(statuses[200], statuses[400]) > 1000
