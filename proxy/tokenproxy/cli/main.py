"""The command `tokenproxy`."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from tokenproxy import __version__
from tokenproxy.agents.flags import add_commands
from tokenproxy.base.errors import UsageError, no_such
from tokenproxy.base.urls import LOCAL_URL, PORT
from tokenproxy.cli.view_flags import add_view

_DESCRIPTION = """\
Token-exact multi-turn chat for vLLM: append to the ids the engine saw, never re-tokenise them.

  tokenproxy vllm MODEL            vLLM with the token routes inside its own API server
  tokenproxy serve --upstream URL  the same routes in front of stock vLLM servers
  tokenproxy key NAME --file FILE  make an API key for `tokenproxy serve --api-key-file FILE`
  tokenproxy run -- COMMAND        a coding agent, or any program, recorded in a session of its own
  tokenproxy env PROGRAM           the environment that makes a program use the proxy
  tokenproxy check MODEL           what can be appended exactly with a chat template, or on a server
  tokenproxy export --out FILE     recorded conversations as training samples
  tokenproxy view SESSION          a rollout as one HTML file: its tokens, their origin, their drift
  tokenproxy top                   what a running proxy does now, in the terminal
  tokenproxy demo                  a small real model on this machine, and proof that its tokens stay exact
"""

_VLLM = """\
Start vLLM with the token routes next to its OpenAI routes. Everything after `tokenproxy vllm` is given to
`vllm serve` as it is, --api-server-count included. Without --port it listens on 8100.

  tokenproxy vllm Qwen/Qwen3-0.6B --enable-auto-tool-choice --tool-call-parser hermes
  tokenproxy vllm --help=all       all flags of vLLM

If vLLM gets --api-key, each of its keys is a tenant: no tenant can continue, list, read or delete what was
recorded with another key. The proxy has settings of its own, in the environment (TOKENPROXY_...) and in the
file that TOKENPROXY_CONFIG names; docs/settings.md lists them.
"""

_SERVE = """\
Put the token routes in front of one or more stock vLLM servers that serve the same model. All other routes of
the servers pass through. At start, and each time a server comes back, the proxy tests how the server
accepts exact prompts; the result is in the log and at /ready.

  tokenproxy serve --upstream http://127.0.0.1:8000
  tokenproxy serve --upstream http://a:8000/v1 --upstream http://b:8000/v1 --host 0.0.0.0 --port 8100
  tokenproxy serve --upstream http://127.0.0.1:8000 --workers 4            four processes on one port
  tokenproxy serve --upstream http://a:8000 --upstream-api-key E --api-key ALICE --api-key BOB --host 0.0.0.0
  tokenproxy serve --config config/replicas.yaml

Every flag is also a setting of the file (--body-limit-bytes is `body_limit_bytes`) and of the environment
(TOKENPROXY_BODY_LIMIT_BYTES). A flag overrides the environment, which overrides the file; docs/settings.md
has the whole list.

Each --api-key is a tenant: no tenant can continue, list, read or delete what was recorded with another key.
Without --api-key all clients are one tenant, unless the engine requires keys of the clients: then each key
that it accepts is a tenant. With --upstream-api-key and no --api-key, every client that reaches the proxy
uses that key of the engines: the proxy then listens on a loopback address only.
"""

_KEY = """\
Make an API key, print it once, and add its name, scopes and digest to a key file. A proxy that runs with
--api-key-file FILE takes the key within a second or two. To revoke a key, delete its entry from the file.

  tokenproxy key trainer --file keys.yaml                                  inference and read
  tokenproxy key dashboard --file keys.yaml --scope read --tenant trainer  reads what `trainer` recorded
  tokenproxy key operator --file keys.yaml --scope admin                   the engines' admin routes

Scopes: `inference` for turns, tokenising and the engines' inference routes; `read` for sessions, samples,
metrics and the details of /ready; `admin` for /admin/ and the engines' admin and development routes.
Keys with one name, or with one --tenant, reach the same recordings. To rotate a key, make a new one of the
same name and delete the old entry. docs/security.md has more.
"""

_CHECK = """\
Examine a chat template: how it closes turns, which tokens end them, which text separates them, whether it
rewrites its history, and to which shapes of conversation messages can be appended exactly.

  tokenproxy check Qwen/Qwen3-0.6B         a hub name or a model folder
  tokenproxy check template.jinja --json   a template alone; its special tokens are guessed from the text
  tokenproxy check --upstream http://a:8000   a running vLLM, also one that renders without a template

Exit code 0 if every shape is exact, 1 if some are refused, 2 if there is no such template or server.
"""

_EXPORT = """\
Write the recorded conversations as training samples: one for each conversation and each branch of it, with
exact ids, loss mask and the log-probabilities of the sampled ids. Turns with inconsistent evidence are left
out, never padded; the table at the end counts them by reason.

  tokenproxy export --out samples.jsonl                       from where the proxy keeps its rollouts
  tokenproxy export --store sqlite:rollouts.db --out samples.jsonl
  tokenproxy export --out samples.parquet --layout verl       typed columns, with a trainer's own field names
  tokenproxy export --out - --session run-7 --session run-8   to stdout, two sessions only
  tokenproxy export --out main.jsonl --class main             without sub-agents, summaries and side calls
  tokenproxy export --out - | head -1 | python -m json.tool   look at one sample
  tokenproxy export --follow --out samples.jsonl              finished rollouts as they come, until Ctrl-C

The file appears when it is complete, and replaces one of the same name. docs/samples.md explains the fields.
With --follow, lines are added to the file; at the end the command prints the cursor with which to continue
(--after CURSOR). docs/feed.md explains when a rollout is finished.
Exit code 0 if the export ran, even if there was nothing; 1 if the store or the file failed; 2 for wrong use.
"""

_TOP = """\
Show what a running proxy does: its replicas and sessions, how many ids it reuses, why prompts were rendered,
how long requests take. It reads /ready, /metrics and /v1/sessions, and keeps trying while the proxy is down.

  tokenproxy top                                  the proxy on this machine, until Ctrl-C
  tokenproxy top --url http://proxy:8100 --api-key KEY
  tokenproxy top --once                           print it once; exit code 1 if the proxy does not respond

Rates cover the time since the last refresh; --once shows totals since the start of the proxy.
"""

_DEMO = """\
Write a small model (SmolLM2-135M) to the cache, start a real vLLM with it on the CPU, and hold the same
conversation with a plain OpenAI client over the chat route, over a chat route that recognises nothing, as a
stock server's, and with ids over the token route. A table shows, turn by turn, which prompts continue exactly
where the model stopped. Exit code 1 if one of the chat or the token route does not.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code.

    Args:
        argv: its arguments; None takes those of this process, which a server then ends itself.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["vllm"]:
            return _vllm(arguments[1:])
        parser = _parser(arguments[0] if arguments else "")
        options = parser.parse_args(arguments)
        if options.command is None:
            parser.print_help()
            return 2
        code: int = options.run(options)
        if argv is None and options.command == "serve":
            # all is closed: Python would take a second to free modules and tokenizers, and wait for threads
            os._exit(code)
        return code
    except UsageError as error:
        print(f"tokenproxy: {error}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    """Takes no abbreviated flag: `--upstreams` would be `--upstreams-file`. Errors are one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """See `argparse.ArgumentParser.error`. The usage would be forty lines."""
        raise UsageError(f"{message}: `{self.prog} --help` explains it")

    def parse_known_args(self, *arguments: Any) -> Any:  # type: ignore[override]
        """See `argparse.ArgumentParser`. Raises UsageError, which names the nearest flag."""
        options, unknown = super().parse_known_args(*arguments)
        if unknown:
            flags = re.findall(r"--[\w-]+", self.format_usage())
            raise UsageError(f"{unknown[0]}: {no_such('flag', unknown[0].partition('=')[0], flags)}")
        return options, unknown


def _parser(command: str) -> argparse.ArgumentParser:
    kind = argparse.RawDescriptionHelpFormatter
    parser: argparse.ArgumentParser = _Parser(
        prog="tokenproxy", description=_DESCRIPTION, formatter_class=kind
    )
    parser.add_argument("--version", action="version", version=f"tokenproxy {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser(
        "vllm", help="vLLM with the token routes inside", description=_VLLM, formatter_class=kind
    )
    serve = commands.add_parser("serve", help="in front of vLLM", description=_SERVE, formatter_class=kind)
    if command == "serve":  # its flags are the settings, which take long to import
        _add_serve(serve)
    _add_key(commands.add_parser("key", help="make an API key", description=_KEY, formatter_class=kind))
    add_commands(commands)
    _add_check(
        commands.add_parser("check", help="examine a template", description=_CHECK, formatter_class=kind)
    )
    _add_export(
        commands.add_parser("export", help="training samples", description=_EXPORT, formatter_class=kind)
    )
    add_view(commands)
    _add_top(commands.add_parser("top", help="watch a running proxy", description=_TOP, formatter_class=kind))
    _add_demo(commands.add_parser("demo", help="see it work", description=_DEMO, formatter_class=kind))
    return parser


def _add_serve(parser: argparse.ArgumentParser) -> None:
    from tokenproxy.settings import add_flags

    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with settings")
    add_flags(parser)
    parser.set_defaults(run=_serve)


def _add_key(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", metavar="NAME", help="name of the key's user: 1 to 100 letters, digits or . _ ~ @ + -")
    add("--file", type=Path, required=True, metavar="FILE", help="key file; created if it does not exist")
    add(
        "--scope",
        action="append",
        choices=("inference", "read", "admin"),
        help="what the key allows; repeatable (default: inference and read)",
    )
    add("--tenant", metavar="NAME", help="tenant whose recordings the key reaches (default: its name)")
    parser.set_defaults(run=_key)


def _add_check(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="MODEL_OR_TEMPLATE", nargs="?", help="model folder, hub name or .jinja file")
    add("--upstream", metavar="URL", help="examine how this running vLLM renders (MODEL: its tokenizer)")
    add("--api-key", metavar="KEY", help="for the requests to --upstream")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=_check)


def _add_export(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", required=True, metavar="FILE", help="file to write; - is stdout")
    add("--store", metavar="URL", help="the store with the proxy's rollouts (default: the setting `store`)")
    add(
        "--format",
        choices=("jsonl", "parquet"),
        help="(default: parquet if FILE ends in .parquet, else jsonl)",
    )
    add(
        "--layout",
        choices=("plain", "trl", "verl", "prime-rl", "skyrl", "openenv", "atif"),
        default="plain",
        help="the trainer whose field names to use (default: %(default)s, with all fields)",
    )
    repeatable = partial(add, action="append", default=[])
    repeatable("--session", metavar="ID", help="export only this session; repeatable (default: all)")
    add(
        "--shared",
        choices=("once", "each"),
        default="once",
        help="train turns that several samples share once, or in each of them (default: %(default)s)",
    )
    repeatable(
        "--class",
        dest="classes",
        metavar="CLASS",
        help="train only turns of this class (main, subagent, compaction, ..., unknown); repeatable",
    )
    on_policy = "train only turns that were sampled by the policy of their session"
    add("--on-policy", action="store_true", help=on_policy)
    add("--follow", action="store_true", help="add finished rollouts to FILE as they come, until Ctrl-C")
    after = "with --follow: continue after this position of the feed"
    add("--after", type=_cursor, metavar="CURSOR", help=after)
    metadata = "with --follow: only sessions with this metadata; repeatable"
    repeatable("--metadata", metavar="KEY=VALUE", help=metadata)
    weights = "with --follow: only samples whose turns were all sampled by these weights; repeatable"
    repeatable("--weight-version", metavar="V", help=weights)
    add("--config", type=Path, metavar="FILE", help="YAML file with settings")
    parser.set_defaults(run=_export)


def _add_top(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", default=LOCAL_URL, help="the proxy (default: %(default)s)")
    add("--api-key", metavar="KEY", help="an API key of the proxy, to list its sessions")
    add("--interval", type=_positive, default=2.0, metavar="S", help="seconds between refreshes (default: 2)")
    add("--once", action="store_true", help="print it once")
    parser.set_defaults(run=_top)


def _cursor(text: str) -> int:
    from tokenproxy.samples.feed import cursor_position

    try:
        return cursor_position(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError("must be a cursor that --follow printed, or 0") from error


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be more than 0")
    return value


def _add_demo(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--serve", action="store_true", help="only start the model and keep it running until Ctrl-C")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, help=f"port to listen on (default: {PORT} with --serve, else a free one)")
    add("--url", metavar="URL", help="use a server that is already running")
    add("--api-server-count", type=int, default=2, metavar="N", help="API processes (default: %(default)s)")
    add("--log", type=Path, metavar="FILE", help="keep vLLM's log in this file")
    parser.set_defaults(run=_demo)


def _vllm(arguments: list[str]) -> int:
    from tokenproxy.app.vllm_launcher import serve

    if not arguments or arguments in (["-h"], ["--help"]):
        print("usage: tokenproxy vllm MODEL [flags of vllm serve]\n\n" + _VLLM)
        return 0 if arguments else 2
    serve(arguments, plugin=True)
    return 0


def _serve(options: argparse.Namespace) -> int:
    from tokenproxy.app.app import check_settings
    from tokenproxy.app.server import run
    from tokenproxy.app.start import check_address
    from tokenproxy.settings import load_settings

    flags: dict[str, Any] = vars(options).copy()
    for name in ("command", "run", "config"):
        flags.pop(name)
    settings = load_settings(options.config, **flags)
    check_settings(settings, settings.workers)
    check_address(settings)
    if not settings.upstreams and settings.upstreams_file is None:
        raise UsageError(
            "no upstream configured: pass --upstream URL or --upstreams-file FILE, or set `upstreams` in "
            "--config FILE"
        )
    return run(settings)


def _key(options: argparse.Namespace) -> int:
    from tokenproxy.cli.key import add_key

    scopes = options.scope or ["inference", "read"]
    print(add_key(options.file, options.name, scopes, options.tenant))
    print(
        f"tokenproxy: added to {options.file} with {', '.join(dict.fromkeys(scopes))}. "
        "Keep the key above: it is not shown again",
        file=sys.stderr,
    )
    return 0


def _check(options: argparse.Namespace) -> int:
    from tokenproxy.cli.check import run_check

    return run_check(options.source, options.upstream, options.api_key, as_json=options.json)


def _export(options: argparse.Namespace) -> int:
    from tokenproxy.cli.export import run_export

    return run_export(options)


def _top(options: argparse.Namespace) -> int:
    from tokenproxy.top.command import run_top

    return run_top(options.url, options.api_key, options.interval, once=options.once)


def _demo(options: argparse.Namespace) -> int:
    from tokenproxy.demo.main import run_demo

    return run_demo(
        host=options.host,
        port=options.port if options.port is not None else PORT if options.serve else 0,
        serve=options.serve,
        keep_log=options.log,
        api_server_count=options.api_server_count,
        url=options.url,
    )
