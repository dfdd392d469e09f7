"""Sphinx: README.md and docs/ as a site; scripts/docs builds it. The pages are plain Markdown."""

import json
import re
from collections.abc import Iterator
from os.path import normpath
from pathlib import Path

from sphinx.application import Sphinx

from tokenproxy import __version__
from tokenproxy.app.app import create_app
from tokenproxy.settings import Settings

project = "tokenproxy"
version = release = __version__
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**", "examples/README.md"]
exclude_patterns = [".*", "build", "proxy", "tests"]
myst_heading_anchors = 4  # anchors as GitHub makes them
html_theme = "furo"
html_title = f"tokenproxy {version}"
html_copy_source = False

_SCHEMA = create_app(Settings(upstreams=["http://engine"], store="memory:")).openapi()


def setup(app: Sphinx) -> None:
    app.connect("source-read", _complete)
    app.connect("build-finished", _write_schema)


def _complete(app: Sphinx, page: str, source: list[str]) -> None:
    """Add to a page what only the site has."""
    if page == root_doc:
        source[0] += "".join(_navigation(Path(app.srcdir, "docs/README.md").read_text()))
    elif page == "docs/openapi":
        source[0] += (
            "\n<a href='openapi.json'>The schema</a>\n\n| route | what it does |\n|---|---|\n"
            + "".join(_routes())
        )


def _navigation(index: str) -> Iterator[str]:
    """A table of contents for each section of docs/README.md, of the pages that the section links to."""
    for section in index.split("\n## ")[1:]:
        title, _, rows = section.partition("\n")
        pages = [normpath(f"docs/{link}") for link in re.findall(r"\]\(([\w./-]+)\.md\)", rows)]
        entries = "\n".join("docs/README" if page == root_doc else page for page in pages)
        entries = re.sub(r"(docs/.+/)README", r"\1README\n\1*", entries)  # with the other pages of its folder
        yield f"\n\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {title}\n\n{entries}\n```\n"


def _routes() -> Iterator[str]:
    for path, operations in _SCHEMA["paths"].items():
        for method, operation in operations.items():
            yield f"| `{method.upper()} {path}` | {operation.get('summary', '')} |\n"


def _write_schema(app: Sphinx, exception: Exception | None) -> None:
    Path(app.outdir, "docs").mkdir(exist_ok=True)
    Path(app.outdir, "docs", "openapi.json").write_text(json.dumps(_SCHEMA, indent=1))
