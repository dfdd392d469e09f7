"""The flags of the commands, and their help. Does not import what only the commands need."""

import argparse
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tokenproxy.base.urls import LOCAL_URL, PORT

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
  tokenproxy key agents --file keys.yaml --scope turns --tenant trainer    turns of `trainer`'s sessions
  tokenproxy key operator --file keys.yaml --scope admin                   the engines' admin routes

Scopes: `turns` for turns and tokenising alone; `inference` for these, the engines' other inference routes,
and creating, rewarding and deleting sessions; `read` for sessions, samples,
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

_RUN = """\
Run a coding agent, or any other command, against a running proxy. It gets the environment that makes it
use the proxy, and a session of its own that records its turns. It keeps its stdin, stdout and terminal, and
signals reach it. At the end, what was recorded is printed to stderr.

  tokenproxy run -- claude -p "Fix the failing test"               Claude Code
  tokenproxy run --max-tokens 4096 -- codex exec "Fix the test"    Codex sets no limit on answers itself
  tokenproxy run --session task-7 -- claude --continue -p "Go on"  in the same session again
  tokenproxy run --reward-from-exit-code -- sh -c 'claude -p "Fix the test" && pytest'
  tokenproxy run --for openai -- python my_agent.py                OPENAI_BASE_URL, OPENAI_API_KEY, ... only

Without --for, the environment is that of the program if the command is claude, codex or opencode, and that of
all programs otherwise, as for scripts. `tokenproxy env PROGRAM` prints it; docs/agents.md explains it.

Exit code: that of the command; 128 plus the number of the signal that ended it; 127 if there is no such
command; 2 if nothing was run, because there is no such proxy or model.
"""

_ENV = """\
Print the environment that makes a program use a running proxy, for a shell to source.

  eval "$(tokenproxy env claude)"                    then: claude -p "Hello"
  eval "$(tokenproxy env codex --session task-7)"    then: codex exec "Hello", recorded in task-7
  tokenproxy env openai --url http://proxy:8100      OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL

Without --session, Claude Code and Codex name the session themselves, by a header of theirs. Exit code 2 if
there is no such proxy or model: then nothing is printed.
"""

_PROGRAMS = ("claude", "codex", "opencode", "openai")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    from tokenproxy.settings import add_flags

    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with settings")
    add_flags(parser)


def _add_key(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", metavar="NAME", help="name of the key's user: 1 to 100 letters, digits or . _ ~ @ + -")
    add("--file", type=Path, required=True, metavar="FILE", help="key file; created if it does not exist")
    add(
        "--scope",
        action="append",
        choices=("turns", "inference", "read", "admin"),
        help="what the key allows; repeatable (default: inference and read)",
    )
    add("--tenant", metavar="NAME", help="tenant whose recordings the key reaches (default: its name)")


def _add_check(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="MODEL_OR_TEMPLATE", nargs="?", help="model folder, hub name or .jinja file")
    add("--upstream", metavar="URL", help="examine how this running vLLM renders (MODEL: its tokenizer)")
    add("--api-key", metavar="KEY", help="for the requests to --upstream")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


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


def _add_view(parser: argparse.ArgumentParser) -> None:
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


def _add_top(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", default=LOCAL_URL, help="the proxy (default: %(default)s)")
    add("--api-key", metavar="KEY", help="an API key of the proxy, to list its sessions")
    add("--interval", type=_positive, default=2.0, metavar="S", help="seconds between refreshes (default: 2)")
    add("--once", action="store_true", help="print it once")


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


def _add_run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_target(parser)
    add(
        "--for",
        dest="programs",
        action="append",
        choices=_PROGRAMS,
        help="set the environment of this program only; repeatable (default: by the command's name)",
    )
    add(
        "--reward-from-exit-code",
        action="store_true",
        help="set the session's reward: 1 if the command ends with 0, else 0",
    )
    # what follows belongs to the command, flags included
    add("arguments", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="the command and its arguments")


def _add_env(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("program", choices=_PROGRAMS, help="openai is every program that uses an OpenAI SDK")
    _add_target(parser)


def _add_target(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the proxy, the session and the model."""
    add = parser.add_argument
    add("--url", help="the proxy (default: $TOKENPROXY_URL, else http://127.0.0.1:8100)")
    add(
        "--api-key", metavar="KEY", help="an API key of the proxy (default: the first in $TOKENPROXY_API_KEY)"
    )
    add("--session", metavar="NAME", help="the session that records the turns")
    add("--model", metavar="NAME", help="a served model or adapter (default: the base model)")
    add("--max-tokens", type=_count, metavar="N", help="most ids of an answer; wins over the program's")
    add("--temperature", type=_temperature, metavar="T", help="of all turns; wins over the program's")
    add(
        "--metadata",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of the session, by which trainers select samples; repeatable",
    )


def _count(text: str) -> int:
    count = int(text)
    if not 0 < count < 2**31:
        raise argparse.ArgumentTypeError("must be more than 0, and less than 2147483648")
    return count


def _temperature(text: str) -> float:
    temperature = float(text)
    if not 0 <= temperature < math.inf:
        raise argparse.ArgumentTypeError("must be 0 or more, and finite")
    return temperature


class Command(NamedTuple):
    """A command of `tokenproxy`."""

    summary: str
    """A line for the list of all."""
    help: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: str
    """`MODULE:FUNCTION`, which is imported when it runs; takes the flags, returns the exit code."""


COMMANDS: Mapping[str, Command] = {
    "run": Command("run a coding agent", _RUN, _add_run, "tokenproxy.agents.command:run_command"),
    "env": Command("a program's environment", _ENV, _add_env, "tokenproxy.agents.command:run_env"),
    "serve": Command("in front of vLLM", _SERVE, _add_serve, "tokenproxy.cli.main:run_serve"),
    "key": Command("make an API key", _KEY, _add_key, "tokenproxy.cli.key:run_key"),
    "check": Command("examine a template", _CHECK, _add_check, "tokenproxy.cli.check:run_check"),
    "export": Command("training samples", _EXPORT, _add_export, "tokenproxy.cli.export:run_export"),
    "view": Command("a rollout as one HTML file", _VIEW, _add_view, "tokenproxy.cli.view:run_view"),
    "top": Command("watch a running proxy", _TOP, _add_top, "tokenproxy.top.command:run_top"),
    "demo": Command("see it work", _DEMO, _add_demo, "tokenproxy.demo.main:run_demo"),
}
