"""The files of the page, and the page with its data as one file that needs no server and contacts none.

The files are plain ES modules, one style sheet and one HTML file; nothing is built. In one file, the modules
become one script: each is a function that returns what it exports. That keeps their names apart, and needs no
bundler, because they use only these forms:

    import { name, name } from "./file.js";        at the beginning of a line, may span lines
    export function | async function | class | const NAME

That file's own policy (`default-src 'none'`) allows this script and this style sheet only, by their digests.
"""

import base64
import hashlib
import re
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import msgspec

from tokenproxy.viewer.recording import PageData

FOLDER = Path(__file__).parent / "static"
PAGE = "index.html"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async function|function|class|const) (\w+))", re.MULTILINE)
_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src '{script_digest}'; \
style-src '{style_digest}'; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>tokenproxy viewer</title>
<style>{style}</style>
</head>
<body>
<noscript>The viewer needs JavaScript.</noscript>
<script type="application/json" id="data">{data}</script>
<script type="module">{script}</script>
</body>
</html>
"""


class StaticFile(NamedTuple):
    """One file, as it is served."""

    content: bytes
    media_type: str
    etag: str
    """With its quotes."""


def load_files() -> dict[str, StaticFile]:
    """All files by their names."""
    files = {}
    for path in sorted(path for path in FOLDER.iterdir() if path.suffix in _TYPES):
        content = path.read_bytes()
        tag = hashlib.blake2b(content, digest_size=12).hexdigest()
        files[path.name] = StaticFile(content, _TYPES[path.suffix], f'"{tag}"')
    return files


def single_file(data: PageData) -> str:
    """The page with this data, as HTML."""
    style, script = (FOLDER / "viewer.css").read_text(), bundle()
    # nothing in a string of JSON can end the script element then
    encoded = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    return _PAGE.format(
        script_digest=_digest(script),
        style_digest=_digest(style),
        style=style,
        script=script,
        data=encoded,
    )


def bundle() -> str:
    """All modules as one script."""
    sources = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.js"))}
    needs = {name: {found[2] for found in _IMPORT.finditer(source)} for name, source in sources.items()}
    order = TopologicalSorter(needs).static_order()
    return "".join(_as_function(name, sources[name]) for name in order)


def _as_function(name: str, source: str) -> str:
    exported = [found[1] for found in _EXPORT.finditer(source)]
    body = _IMPORT.sub(lambda found: f"const {{{found[1]}}} = module_{found[2]};\n", source)
    body = _EXPORT.sub("", body)
    return f"const module_{name} = (() => {{\n{body}\nreturn {{ {', '.join(exported)} }};\n}})();\n"


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
