"""`tokenproxy demo`: start vLLM on this machine, hold one conversation over three routes, compare them."""

import argparse
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from types import FrameType
from urllib.parse import quote

from openai import OpenAI, OpenAIError

from tokenproxy.base.urls import PORT
from tokenproxy.demo import ConversationError, DemoError, EngineStartError
from tokenproxy.demo.checkpoint import default_cache_dir, ensure_checkpoint
from tokenproxy.demo.conversation import ChatRoute, Conversation, StockRoute, TokenRoute, Turn, converse
from tokenproxy.demo.progress import progress
from tokenproxy.demo.stack import MODEL_NAME, EngineProcess
from tokenproxy.record.vocabulary import Reason
from tokenproxy.viewer.page import single_file
from tokenproxy.viewer.served import ViewError, page_from_server

WIDTH = 100
"""Columns of the terminal for which the table of two conversations is written."""

_SIDE = (("prompt", 7), ("reused", 7), ("added", 6), ("exact", 6), ("cached", 7), ("out", 4), ("s", 5))
_SIDE_WIDTH = sum(width for _, width in _SIDE)
_LEGEND = (
    "prompt: ids in the prompt; reused: its first ids, equal to those of the turn before; added:",
    "the ids after them; exact: all ids of the turn before, prompt and completion, are reused; cached:",
    "ids from the engine's prefix cache (whole blocks); out: ids sampled; s: seconds.",
)
_EXACT, _BROKEN, _NOT_RUN = 0, 1, 2

_HOW_TO = """\
from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="none")
messages = [{{"role": "user", "content": "What is the capital of France?"}}]
body = {{"model": "{model}", "messages": messages, "temperature": 0}}
turn = client.post("/chat/completions/tokens", body=body, cast_to=object)
print(turn["prompt_token_ids"], turn["choices"][0]["token_ids"], turn["choices"][0]["message"]["content"])
"""


def run_demo(options: argparse.Namespace) -> int:
    """Start a server, show that its token route and chat route keep the ids exact, and stop it.

    With `--url` it uses a running one. With `--serve` it prints how to use the server in place of the
    conversations, and runs it until Ctrl-C. Results go to stdout, progress to stderr.

    Returns:
        0 if every follow-up turn of both routes was exact; 1 if one was not; 2 if the server did not
        start or respond; 130 if the demo was interrupted.
    """
    try:
        with _sigterm_as_interrupt():
            if options.url is not None:
                if options.serve:
                    raise DemoError(
                        "--serve starts a server, --url uses a running one: pass only one of them"
                    )
                return _compare(options.url.rstrip("/").removesuffix("/v1"))
            with EngineProcess(
                ensure_checkpoint(),
                host=options.host,
                port=options.port if options.port is not None else PORT if options.serve else 0,
                api_server_count=options.api_server_count,
                log_file=options.log,
            ) as engine:
                engine.wait_ready()
                if options.serve:
                    return _serve(engine)
                return _compare(engine.url)
    except DemoError as error:
        progress(f"tokenproxy demo: {error}")
        if isinstance(error, EngineStartError) and options.log is None:
            progress("to keep the whole log of vLLM, pass --log FILE")
        return _NOT_RUN
    except KeyboardInterrupt:
        progress("interrupted")
        return 130


def _compare(url: str) -> int:
    """Hold the conversations and print the table.

    Raises:
        ConversationError: the server does not respond, or does not have the routes.
    """
    # The engine reads the same variable, and then requires the key from its clients.
    key = os.environ.get("VLLM_API_KEY") or "none"
    client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    model = _served_model(client, url)
    started = time.monotonic()
    tokens = converse(TokenRoute(client), model)
    chat = converse(ChatRoute(client), model)
    stock = converse(StockRoute(client), model)
    print(render(chat, stock))
    print(summary(tokens))
    progress(f"the three conversations took {time.monotonic() - started:.0f} s")
    sessions = [found.session for found in (tokens, chat, stock) if found.session is not None]
    _show_rollouts(url, key, sessions)
    return _EXACT if all(result.exact == result.follow_ups for result in (tokens, chat)) else _BROKEN


def render(left: Conversation, right: Conversation) -> str:
    """The table, a legend and a summary line for each conversation. No line is longer than `WIDTH`."""
    lines = [
        _line("", "", left.route.center(_SIDE_WIDTH), right.route.center(_SIDE_WIDTH)),
        _line("turn", "kind", *(_cells([name for name, _ in _SIDE]) for _ in range(2))),
        "-" * len(_line("", "", " " * _SIDE_WIDTH, " " * _SIDE_WIDTH)),
    ]
    for left_turn, right_turn in zip_longest(left.turns, right.turns):
        turn = left_turn or right_turn
        lines.append(_line(str(turn.number), turn.kind, _side(left_turn), _side(right_turn)))
    return "\n".join(line.rstrip() for line in [*lines, "", *_LEGEND, "", summary(left), summary(right)])


def summary(conversation: Conversation) -> str:
    """One line with the number of follow-up turns that are exact, and of those that drifted."""
    total, exact = conversation.follow_ups, conversation.exact
    if total == 0:
        return f"{conversation.route}: no follow-up turns"
    drifted = total - exact
    line = f"{conversation.route}: {exact} of {total} follow-up turns exact ({exact / total:.0%})"
    return f"{line}, {drifted} drifted" if drifted else line


def _line(number: str, kind: str, left: str, right: str) -> str:
    return f"{number:>4} {kind:<6} |{left} |{right}"


def _side(turn: Turn | None) -> str:
    if turn is None:
        return " " * _SIDE_WIDTH
    exact = {None: "-", True: "yes", False: "NO"}[turn.exact]
    cached = "?" if turn.cached is None else str(turn.cached)
    values = [turn.prompt, turn.reused, turn.appended, exact, cached, turn.completion, f"{turn.seconds:.1f}"]
    return _cells(values)


def _cells(values: Sequence[object]) -> str:
    return "".join(f"{value!s:>{width}}" for value, (_, width) in zip(values, _SIDE, strict=True))


def _show_rollouts(url: str, key: str, sessions: Sequence[str]) -> None:
    """Print where to look at the conversations side by side."""
    if not sessions:
        return
    try:
        page = _write_page(url, key, sessions)
    except (ViewError, OSError) as error:
        progress(f"the rollouts cannot be shown: {error}")
        return
    compared = "/".join(f"{quote(session)}/-" for session in sessions)
    print(f"\ntoken by token, side by side: {page}#/compare/{compared}")


def _write_page(url: str, key: str, sessions: Sequence[str]) -> str:
    """Write a page with sessions of a running server; returns the address of the file.

    Raises:
        ViewError: the server does not show them.
        OSError: the file cannot be written.
    """
    page = page_from_server(url, key, sessions)
    for turn in (turn for tree in page.trees.values() for turn in tree["turns"]):
        if turn["reason"] == Reason.TEMPLATE_KWARGS_CHANGED:
            turn["reason"] = None  # how `StockRoute` gets a rendering; a stock server has no reasons
    file = default_cache_dir() / "demo-rollouts.html"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(single_file(page))
    return file.resolve().as_uri()


def _served_model(client: OpenAI, url: str) -> str:
    try:
        models = client.models.list().data
    except OpenAIError as error:
        raise ConversationError(
            f"no OpenAI server responds at {url}: start one, or omit --url ({error})"
        ) from error
    if not models:
        raise ConversationError(f"the server at {url} lists no model: start it with one")
    return models[0].id


def _serve(engine: EngineProcess) -> int:
    print(f"serving {MODEL_NAME} at {engine.url}/v1 until Ctrl-C; from Python:\n")
    print(_HOW_TO.format(url=engine.url, model=MODEL_NAME))
    print(f"the recorded rollouts: {engine.url}/viewer", flush=True)
    try:
        while True:
            engine.check_alive()
            time.sleep(1.0)
    except KeyboardInterrupt:
        progress("stopping")
    return _EXACT


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C in the `with` block, so that a cancelled job stops its engine."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
