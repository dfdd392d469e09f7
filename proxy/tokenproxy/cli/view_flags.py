"""The flags of `tokenproxy view`, and its help."""

import argparse
from pathlib import Path
from typing import Any

_VIEW = """\
Write recorded sessions as one HTML file: turns, conversations, tokens with origin and log-probabilities,
and where a rendering without the record would differ. The file needs no server, and contacts none.

  tokenproxy view run-7 --tokenizer Qwen/Qwen3-0.6B      from where the proxy keeps its rollouts
  tokenproxy view run-7 run-8 -o both.html --store sqlite:rollouts.db
  tokenproxy view samples.jsonl --tokenizer Qwen/Qwen3-0.6B  all rollouts of an export, JSON lines or Parquet
  tokenproxy view run-7 --url http://proxy:8100          from a running proxy, with the texts of its tokenizer
  tokenproxy view --serve --tokenizer Qwen/Qwen3-0.6B    all sessions, in a browser, without a proxy
  tokenproxy view --serve rollouts.db                    a file, or a URL of a store

Without a tokenizer the page shows ids without texts. A running proxy shows the same at /viewer, and all its
sessions; docs/viewer.md explains the page.
Exit code 0 if the file was written, 1 if store, proxy or file failed, 2 for wrong use.
"""


def add_view(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser of `tokenproxy`."""
    parser = commands.add_parser(
        "view",
        help="a rollout as one HTML file",
        description=_VIEW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("target", nargs="*", metavar="SESSION|FILE", help="a session's id, or a file of `tokenproxy export`")
    add("--serve", action="store_true", help="serve the page of a store, read-only, on this machine")
    add("--port", type=int, default=8101, help="with --serve: port to listen on (default: %(default)s)")
    add("-o", "--output", metavar="FILE", help="file to write (default: the first target's name with .html)")
    add("--store", metavar="URL", help="the store with the sessions (default: the setting `store`)")
    add("--tokenizer", metavar="MODEL", help="model folder or hub name, for the texts of the ids")
    add("--chat-template", type=Path, metavar="FILE", help="template that replaces the model's own")
    add("--url", metavar="URL", help="read the sessions from this running proxy")
    add("--api-key", metavar="KEY", help="with --url: an API key of the proxy with the scope `read`")
    add("--config", type=Path, metavar="FILE", help="YAML file with settings")
    parser.set_defaults(run=_run)


def _run(options: Any) -> int:
    from tokenproxy.cli.view import run_view

    return run_view(options)
