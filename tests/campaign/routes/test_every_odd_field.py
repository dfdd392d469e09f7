"""Every odd value in every field; `tests/contract/routes/test_odd_requests.py` tries a few of each."""

from typing import Any

import httpx
import pytest

from tests.contract.routes.conftest import engine  # noqa: F401
from tests.contract.routes.test_odd_requests import (  # noqa: F401
    CASES,
    ODD,
    nothing_unexpected,
    send_odd,
    talked,
)


@pytest.mark.parametrize(
    ("path", "base", "field"), CASES, ids=[f"{path}-{field}" for path, _, field in CASES]
)
def test_every_odd_value(talked: httpx.Client, path: str, base: dict[str, Any], field: str) -> None:  # noqa: F811
    for odd in ODD:
        for session in (False, True):
            send_odd(talked, path, base, field, odd, session)
