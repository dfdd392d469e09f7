"""The system's Chromium, driven by Playwright.

Each test gets a page in a context of its own, with an empty cache. What goes wrong in the page is collected,
and fails the test at its end: errors on the console, uncaught exceptions, violations of the
Content-Security-Policy, requests to other servers, dialogs, crashes.
"""

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Page

_CACHE = Path(__file__).parents[3] / ".cache"
_AXE = _CACHE / "axe-core" / "node_modules" / "axe-core" / "axe.min.js"
_TIMEOUT_MS = 30_000
_LAST_EVENTS_S = 10.0
"""How long the end of a test waits for a page that does not respond."""
_ARGUMENTS = (
    # tests reach loopback only
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--disable-background-networking",
    # /dev/shm is small in containers, and a page that fills it crashes
    "--disable-dev-shm-usage",
    "--enable-precise-memory-info",
)
_REPORT_VIOLATIONS = """
document.addEventListener('securitypolicyviolation', (event) => reportPolicyViolation(
    `${event.effectiveDirective} blocks ${event.blockedURI || 'inline'}`
    + ` in ${event.sourceFile || location.href}:${event.lineNumber}`
), {capture: true});
"""


def missing_program() -> str:
    """What has to be installed before a test can use a browser; empty if nothing is missing."""
    if shutil.which("chromium") is None:
        return "no chromium: run scripts/install-programs chromium"
    return ""


@asynccontextmanager
async def run_browser() -> AsyncIterator["Browser"]:
    """Run Debian's Chromium without a window."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=[*_ARGUMENTS, *(["--no-sandbox"] if os.getuid() == 0 else [])],
        )
        try:
            yield browser
        finally:
            await browser.close()


@dataclass(frozen=True)
class PageOptions:
    """The window and the preferences of the person in front of it."""

    width: int = 1280
    """In CSS pixels."""
    height: int = 800
    dark: bool = False
    touch: bool = False
    """A phone: a touch screen, and no mouse."""


PHONE = PageOptions(width=390, height=844, touch=True)
DARK = PageOptions(dark=True)


@dataclass
class Viewer:
    """The viewer of a proxy in a browser page."""

    page: "Page"
    url: str
    """The proxy: scheme, host, port."""
    problems: list[str] = field(default_factory=list)
    """What went wrong in the page so far. The test fails at its end if there is anything."""

    async def open(self, fragment: str = "", *, path: str = "/viewer") -> None:
        """Open the page, or the view of it that a fragment names, such as `#/s/NAME`."""
        response = await self.page.goto(f"{self.url}{path}{fragment}")
        # None if only the fragment differs from that of the open page
        assert response is None or response.ok, f"{path}: {response.status} {await response.text()}"

    async def open_tokens(self, session: str, turn: str, token: int | None = None) -> None:
        """Open the ids of the path to a turn, and wait for its drift lane."""
        await self.open(f"#/s/{session}/{turn}/tokens" + ("" if token is None else f"?token={token}"))
        await self.page.wait_for_selector(".token.sampled")
        await self.page.wait_for_selector(".token-panel > .status:not(:empty)")

    async def shown(self, selector: str, name: str) -> list[str]:
        """What the elements that a selector matches have in their `data-` attribute of a name."""
        values: list[str] = await self.page.locator(selector).evaluate_all(
            "(elements, name) => elements.map((element) => element.dataset[name])", name
        )
        return values

    async def text(self, selector: str = "body") -> str:
        """The visible text of the first element that a selector matches; not for what holds turns."""
        text: str = await self.page.locator(selector).first.inner_text()
        return text

    async def text_of_turns(self, selector: str = ".conversation") -> str:
        """The text of an element that holds turns, which are laid out only when they become visible."""
        return await self.page.locator(selector).first.text_content() or ""

    async def take_problems(self) -> list[str]:
        """Return and forget what went wrong so far: for tests that expect it."""
        await self.last_events()
        taken, self.problems[:] = list(self.problems), []
        return taken

    async def last_events(self) -> None:
        """Wait until everything that the page reported before this call has arrived."""
        if not self.page.is_closed():
            async with asyncio.timeout(_LAST_EVENTS_S):
                await self.page.evaluate("() => new Promise(requestAnimationFrame)")

    async def accessibility_violations(self) -> list[str]:
        """The violations that axe-core finds: rule, impact, and up to three elements."""
        if not await self.page.evaluate("() => 'axe' in window"):
            await self.page.evaluate(await asyncio.to_thread(_AXE.read_text))
        found = await self.page.evaluate(
            "async () => (await axe.run('html', {resultTypes: ['violations']})).violations"
            ".map((each) => ({...each, nodes: each.nodes.map((node) => node.target.join(' '))}))"
        )
        return [f"{each['id']} ({each['impact']}): {', '.join(each['nodes'][:3])}" for each in found]


def axe_is_installed() -> bool:
    """Whether `Viewer.accessibility_violations` can be called."""
    return _AXE.is_file()


@asynccontextmanager
async def watched_page(
    browser: "Browser", url: str, options: PageOptions | None = None
) -> AsyncIterator[Viewer]:
    """A page in a new context, which may send requests to one server only. Nothing is open yet.

    The test fails at its end if anything went wrong in the page that it did not take.
    """
    options = options or PageOptions()
    context = await browser.new_context(
        viewport={"width": options.width, "height": options.height},
        color_scheme="dark" if options.dark else "light",
        has_touch=options.touch,
        is_mobile=options.touch,
        locale="en-US",
        timezone_id="UTC",
    )
    context.set_default_timeout(_TIMEOUT_MS)
    try:
        viewer = Viewer(await context.new_page(), url)
        await _collect_problems(context, viewer)
        yield viewer
        await viewer.last_events()
    finally:
        await context.close()
    assert not viewer.problems, "in the page: " + json.dumps(viewer.problems, indent=1, ensure_ascii=False)


async def _collect_problems(context: "BrowserContext", viewer: Viewer) -> None:
    problems = viewer.problems

    def on_console(message: Any) -> None:
        if message.type in ("error", "assert"):
            problems.append(f"console: {message.text} ({message.location.get('url')})")

    def on_uncaught(error: Any) -> None:
        # what is no Error has no stack
        problems.append(f"uncaught: {getattr(error.error, 'stack', None) or error.error}")

    def on_request(request: Any) -> None:
        if not request.url.startswith((f"{viewer.url}/", "data:", "blob:")):
            problems.append(f"request to another server: {request.url[:200]}")

    async def on_dialog(dialog: Any) -> None:
        problems.append(f"dialog: {dialog.type} {dialog.message[:200]}")
        await dialog.dismiss()

    def on_policy_violation(source: Any, text: str) -> None:
        problems.append(f"policy: {text}")

    context.on("console", on_console)
    context.on("request", on_request)
    context.on("dialog", on_dialog)
    context.on("weberror", on_uncaught)
    viewer.page.on("crash", lambda page: problems.append("the page crashed"))
    await context.expose_binding("reportPolicyViolation", on_policy_violation)
    await context.add_init_script(_REPORT_VIOLATIONS)
