"""The command `tokenproxy`."""

import argparse
import gc
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from tokenproxy import __version__
from tokenproxy.base.errors import UsageError, no_such
from tokenproxy.cli.flags import COMMANDS

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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code.

    Args:
        argv: its arguments; None takes those of this process, which a server then ends itself.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["serve"]:
        gc.disable()  # its imports make no garbage: a tenth of their time. `run` enables it again
    try:
        if arguments[:1] == ["vllm"]:
            return _vllm(arguments[1:])
        parser = _parser(arguments[0] if arguments else "")
        options = parser.parse_args(arguments)
        if options.command is None:
            parser.print_help()
            return 2
        module, _, function = COMMANDS[options.command].run.partition(":")
        code: int = getattr(import_module(module), function)(options)
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
    for name, known in COMMANDS.items():
        added = commands.add_parser(name, help=known.summary, description=known.help, formatter_class=kind)
        if name != "serve" or command == "serve":  # its flags are the settings: a long import
            known.add_flags(added)
    return parser


def _vllm(arguments: list[str]) -> int:
    from tokenproxy.app.vllm_launcher import serve

    if not arguments or arguments in (["-h"], ["--help"]):
        print("usage: tokenproxy vllm MODEL [flags of vllm serve]\n\n" + _VLLM)
        return 0 if arguments else 2
    serve(arguments, plugin=True)
    return 0


def run_serve(options: argparse.Namespace) -> int:
    """Serve the proxy until it is stopped; returns the exit code.

    Raises:
        UsageError: the settings cannot be used.
    """
    from tokenproxy.app.app import check_settings
    from tokenproxy.app.server import run
    from tokenproxy.app.start import check_address
    from tokenproxy.settings import load_settings

    given: dict[str, Any] = vars(options).copy()
    for name in ("command", "config"):
        given.pop(name)
    settings = load_settings(options.config, **given)
    check_settings(settings, settings.workers)
    check_address(settings)
    if not settings.upstreams and settings.upstreams_file is None:
        raise UsageError(
            "no upstream configured: pass --upstream URL or --upstreams-file FILE, or set `upstreams` in "
            "--config FILE"
        )
    return run(settings)
