"""Writes the page with its data as one file that needs no server and contacts none.

The modules become one script: each is a function that returns what it exports. That keeps their names apart,
and needs no bundler, because they use only these forms:

    import { name, name } from "./file.js";        at the beginning of a line, may span lines
    export function | async function | class | const NAME

The file's own policy (`default-src 'none'`) allows this script and this style sheet only, by their digests.
"""

import base64
import hashlib
import re
from graphlib import TopologicalSorter

import msgspec

from proxy.viewer.files import FOLDER
from proxy.viewer.recording import PageData

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async function|function|class|const) (\w+))", re.MULTILINE)
_OTHER = re.compile(r"^(?:import|export)\b.*", re.MULTILINE)
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
    """All modules as one script.

    Raises:
        ValueError: a module has an import or export of another form.
    """
    sources = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.js"))}
    needs = {name: {found[2] for found in _IMPORT.finditer(source)} for name, source in sources.items()}
    order = TopologicalSorter(needs).static_order()
    return "".join(_as_function(name, sources[name]) for name in order)


def _as_function(name: str, source: str) -> str:
    exported = [found[1] for found in _EXPORT.finditer(source)]
    body = _IMPORT.sub(lambda found: f"const {{{found[1]}}} = module_{found[2]};\n", source)
    body = _EXPORT.sub("", body)
    if other := _OTHER.search(body):
        raise ValueError(f"{name}.js has an import or export that cannot be put into one file: {other[0]}")
    if "</script" in body.lower():
        raise ValueError(f"{name}.js holds the text </script, which ends a script in HTML")
    return f"const module_{name} = (() => {{\n{body}\nreturn {{ {', '.join(exported)} }};\n}})();\n"


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
