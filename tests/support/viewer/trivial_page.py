"""A page in place of the viewer, with faults that the tests of the helpers cause on purpose."""

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, Response

_PAGE = """<!doctype html>
<html lang="en">
<head><title>Trivial</title><link rel="icon" href="/icon.svg"><script src="/page.js" defer></script></head>
<body><main><h1>Trivial</h1><p id="view">loading</p><div id="rows"></div></main></body>
</html>
"""
_SCRIPT = """
const ROWS = 2000;
addEventListener('load', () => setTimeout(() => {
    const rows = document.getElementById('rows');
    rows.style.cssText = 'height: 400px; overflow-y: scroll';
    rows.tabIndex = 0;
    for (let row = 0; row < ROWS; row += 1) {
        const line = document.createElement('p');
        line.className = 'row';
        line.textContent = `row ${row}`;
        rows.append(line);
    }
    document.getElementById('view').textContent = location.hash || 'no fragment';
}, 300));
window.block = (milliseconds) => {
    const end = performance.now() + milliseconds;
    while (performance.now() < end);
};
"""
_ICON = '<svg xmlns="http://www.w3.org/2000/svg"/>'


def trivial_app() -> FastAPI:
    """Serves the page at /viewer, with the Content-Security-Policy of the viewer.

    300 ms after it is loaded, it shows its fragment in `#view`, and 2,000 rows in `#rows`, which scrolls.
    """
    app = FastAPI()

    @app.middleware("http")
    async def add_policy(request: Request, call_next):
        response = await call_next(request)
        response.headers["content-security-policy"] = "default-src 'self'; style-src 'self' 'unsafe-inline'"
        return response

    @app.get("/viewer")
    async def page() -> HTMLResponse:
        return HTMLResponse(_PAGE)

    @app.get("/page.js")
    async def script() -> Response:
        return Response(_SCRIPT, media_type="text/javascript")

    # browsers look for the second one where a page names none
    @app.get("/icon.svg")
    @app.get("/favicon.ico")
    async def icon() -> Response:
        return Response(_ICON, media_type="image/svg+xml")

    @app.get("/broken")
    async def broken() -> PlainTextResponse:
        return PlainTextResponse("broken", status_code=500)

    return app
