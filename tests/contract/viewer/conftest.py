"""The page in a real browser, over a running proxy with recorded sessions.

A test takes `viewer`, a page in a context of its own: `async def test_x(viewer: Viewer)` with
`await viewer.open("#/s/NAME")`. Other windows and other proxies are parameters:

    @pytest.mark.parametrize("page_options", [PHONE], ids=["phone"])    another window
    @pytest.mark.parametrize("recorded", ["many"], indirect=True)       another proxy: see `recorded`
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.support.store_utils import opened
from tests.support.tiny_model import TinyModel
from tests.support.viewer.browser import PageOptions, Viewer, missing_program, run_browser, watched_page
from tests.support.viewer.recordings import LIMITS, RecordedProxy, recordings, run_recorded_proxy, write
from tests.support.viewer.small_session import SmallSession, small_session

if TYPE_CHECKING:
    from playwright.async_api import Browser

    from tokenproxy.record.store import Store

RunRecorded = Callable[[str], Awaitable[RecordedProxy]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run every coroutine that uses the browser in its event loop, the session's."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator["Browser"]:
    """One Chromium for all tests of a run."""
    if missing := missing_program():
        pytest.skip(missing)
    async with run_browser() as browser:
        yield browser


@pytest.fixture(scope="session")
def run_recorded(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunRecorded]:
    """Runs a proxy over the recordings of a name, once in a run. What a test adds to it stays."""
    started: dict[str, RecordedProxy] = {}
    with ExitStack() as stack:

        async def run(name: str) -> RecordedProxy:
            if name not in started:
                folder = tmp_path_factory.mktemp(f"recorded-{name}")
                store = f"sqlite://{folder / 'rollouts.db'}"
                async with opened(store, LIMITS) as opened_store:
                    await write(opened_store, recordings(name, tiny_model))
                proxy = run_recorded_proxy(tiny_model, store, folder / "proxy.log")
                started[name] = stack.enter_context(proxy)
            return started[name]

        yield run


@pytest.fixture
def usual() -> str:
    """What the proxies of these tests have recorded, as `recordings` names it."""
    return "two"


@pytest_asyncio.fixture(loop_scope="session")
async def recorded(request: pytest.FixtureRequest, usual: str, run_recorded: RunRecorded) -> RecordedProxy:
    """A proxy over the recordings that the parameter names: the usual ones if there is none."""
    return await run_recorded(getattr(request, "param", usual))


@pytest.fixture(scope="session")
def small(tiny_model: TinyModel) -> SmallSession:
    return small_session(tiny_model)


@pytest_asyncio.fixture(loop_scope="session")
async def recorded_store(recorded: RecordedProxy) -> AsyncIterator["Store"]:
    """The store of the running proxy, to record more meanwhile."""
    async with opened(recorded.store, LIMITS) as store:
        yield store


@pytest.fixture
def page_options() -> PageOptions:
    """A window of a desktop in light colours."""
    return PageOptions()


@pytest_asyncio.fixture(loop_scope="session")
async def viewer(
    browser: "Browser", recorded: RecordedProxy, page_options: PageOptions
) -> AsyncIterator[Viewer]:
    """The viewer of `recorded`. The test fails at its end if anything went wrong in the page."""
    async with watched_page(browser, recorded.url, page_options) as viewer:
        yield viewer
