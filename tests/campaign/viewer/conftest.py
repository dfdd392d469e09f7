from tests.contract.viewer.conftest import (  # noqa: F401
    browser,
    open_page,
    page_options,
    recorded,
    recorded_proxies,
    recorded_store,
    started_proxies,
    viewer,
    viewer_model,
)
