"""The flags of `tokenproxy run` and `tokenproxy env`. Does not import what only they need."""

import argparse
import math

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


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add both commands."""
    kind = argparse.RawDescriptionHelpFormatter
    run = commands.add_parser("run", help="run a coding agent", description=_RUN, formatter_class=kind)
    _add_run(run)
    env = commands.add_parser("env", help="a program's environment", description=_ENV, formatter_class=kind)
    _add_env(env)


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
    parser.set_defaults(run=_run_command)


def _add_env(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("program", choices=_PROGRAMS, help="openai is every program that uses an OpenAI SDK")
    _add_target(parser)
    parser.set_defaults(run=_run_env)


def _add_target(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the proxy, the session and the model."""
    add = parser.add_argument
    add("--url", help="the proxy (default: $TOKENPROXY_URL, else http://127.0.0.1:8100)")
    add(
        "--api-key", metavar="KEY", help="an API key of the proxy (default: the first in $TOKENPROXY_API_KEY)"
    )
    add("--session", metavar="NAME", help="the session that records the turns")
    add("--model", metavar="NAME", help="a served model or adapter (default: the base model)")
    add("--max-tokens", type=_count, metavar="N", help="most ids of an answer, whatever the program requests")
    add("--temperature", type=_temperature, metavar="T", help="of all turns, whatever the program requests")
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


def _run_command(options: argparse.Namespace) -> int:
    from tokenproxy.agents.command import run_command

    return run_command(options)


def _run_env(options: argparse.Namespace) -> int:
    from tokenproxy.agents.command import run_env

    return run_env(options)
