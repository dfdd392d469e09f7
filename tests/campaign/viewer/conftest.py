"""The browser and the proxies of tests/contract/viewer, over more and larger recordings."""

import pytest

from tests.contract.viewer.conftest import (  # noqa: F401
    browser,
    page_options,
    pytest_collection_modifyitems,
    recorded,
    recorded_store,
    run_recorded,
    small,
    viewer,
)


@pytest.fixture
def usual() -> str:
    """See `usual` there."""
    return "few"
