"""The browser of these tests: every problem in a page is found, on a page that has them on purpose."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.support.utils import run_server
from tests.support.viewer.browser import DARK, PHONE, PageOptions, Viewer, axe_is_installed, missing_program
from tests.support.viewer.trivial_page import trivial_app

_INSTALL = Path(__file__).parents[3] / "scripts" / "install-browser"
OpenPage = Callable[..., AbstractAsyncContextManager[Viewer]]


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with run_server(trivial_app()) as url:
        yield url


async def test_sound_page_has_no_problems(site: str, open_page: OpenPage) -> None:
    async with open_page(site) as viewer:
        await viewer.open("#/s/NAME")
        await viewer.page.get_by_text("row 7", exact=True).wait_for()
        assert await viewer.text("#view") == "#/s/NAME"


@pytest.mark.parametrize(
    "script, found",
    [
        ("console.error('it is broken')", "console: it is broken"),
        ("console.assert(false, 'not so')", "console: not so"),
        ("setTimeout(() => { throw new Error('thrown') })", "uncaught: Error: thrown"),
        ("Promise.reject(new Error('rejected'))", "uncaught: Error: rejected"),
        ("alert('hello')", "dialog: alert hello"),
        ("fetch('/broken').then(() => 0)", "console: Failed to load resource"),
        ("fetch('http://127.0.0.1:9/').catch(() => 0)", "policy: connect-src blocks http://127.0.0.1:9/"),
        ("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=f()>')", "policy: script-src"),
        (
            "document.body.append(Object.assign(document.createElement('script'), {text: 'f()'}))",
            "policy: script-src-elem blocks inline",
        ),
        (
            "document.body.append(Object.assign(new Image(), {src: 'https://example.com/leak.png'}))",
            "policy: img-src blocks https://example.com",
        ),
        ("window.open('http://127.0.0.1:9/')", "request to another server: http://127.0.0.1:9/"),
    ],
    ids=[
        "console error",
        "failed assertion",
        "exception",
        "rejection",
        "dialog",
        "error status",
        "connection",
        "inline handler",
        "inline script",
        "image of another server",
        "window of another server",
    ],
)
async def test_problem_in_the_page_fails_the_test_at_its_end(
    site: str, open_page: OpenPage, script: str, found: str
) -> None:
    with pytest.raises(AssertionError) as failed:
        async with open_page(site) as viewer:
            await viewer.open()
            await viewer.page.evaluate(f"() => {{ {script} }}")
            await viewer.page.wait_for_timeout(100)
    assert found in str(failed.value)


async def test_problems_that_a_test_took_do_not_fail_it(site: str, open_page: OpenPage) -> None:
    async with open_page(site) as viewer:
        await viewer.open()
        await viewer.page.evaluate("() => console.error('expected')")
        [problem] = await viewer.take_problems()
        assert "expected" in problem


async def test_page_that_the_server_refuses_cannot_be_opened(site: str, open_page: OpenPage) -> None:
    async with open_page(site) as viewer:
        with pytest.raises(AssertionError, match="/broken: 500"):
            await viewer.open(path="/broken")
        assert await viewer.take_problems()


@pytest.mark.parametrize(
    "options, width, dark, touch",
    [(PageOptions(), 1280, False, False), (DARK, 1280, True, False), (PHONE, 390, False, True)],
    ids=["desktop", "dark", "phone"],
)
async def test_page_has_the_window_of_its_options(
    site: str, open_page: OpenPage, options: PageOptions, width: int, dark: bool, touch: bool
) -> None:
    async with open_page(site, options) as viewer:
        await viewer.open()
        seen = await viewer.page.evaluate(
            "() => [screen.width, matchMedia('(prefers-color-scheme: dark)').matches,"
            " matchMedia('(pointer: coarse)').matches]"
        )
        assert seen == [width, dark, touch]


@pytest.mark.skipif(not axe_is_installed(), reason="no axe-core: run scripts/install-programs axe-core")
async def test_accessibility_violations_name_the_rule_and_the_element(site: str, open_page: OpenPage) -> None:
    async with open_page(site) as viewer:
        await viewer.open()
        await viewer.page.locator(".row").first.wait_for()
        assert await viewer.accessibility_violations() == []
        await viewer.page.evaluate("() => document.querySelector('main').append(new Image())")
        assert await viewer.accessibility_violations() == ["image-alt (critical): img"]


@pytest.mark.skipif(bool(missing_program()) or not axe_is_installed(), reason="no axe-core")
def test_installation_does_nothing_where_everything_is_installed() -> None:
    run = subprocess.run([_INSTALL], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_installation_of_an_unknown_program_is_refused() -> None:
    run = subprocess.run([_INSTALL, "firefox"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    assert "no such program: firefox" in run.stderr
