"""The browser and the proxies of tests/contract/viewer, over more and larger recordings."""

import pytest

from tests.contract.viewer.conftest import (  # noqa: F401
    browser,
    open_page,
    page_options,
    pytest_collection_modifyitems,
    recorded,
    recorded_proxies,
    recorded_store,
    started_proxies,
    viewer,
)


@pytest.fixture
def recordings() -> str:
    """See `recordings` there."""
    return "few"
