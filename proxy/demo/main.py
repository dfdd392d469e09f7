"""`tokenproxy demo`: a real stack on this machine, one conversation over three routes, and what it shows."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from openai import OpenAI, OpenAIError

from proxy.demo.checkpoint import ensure_checkpoint
from proxy.demo.conversation import ChatRoute, StockRoute, TokenRoute, converse
from proxy.demo.errors import ConversationError, DemoError, EngineStartError
from proxy.demo.progress import Say, say_stderr
from proxy.demo.stack import MODEL_NAME, EngineProcess
from proxy.demo.table import render, summary

_EXACT, _BROKEN, _NOT_RUN = 0, 1, 2

_HOW_TO = """\
from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="none")
messages = [{{"role": "user", "content": "What is the capital of France?"}}]
body = {{"model": "{model}", "messages": messages, "temperature": 0}}
turn = client.post("/chat/completions/tokens", body=body, cast_to=object)
print(turn["prompt_token_ids"], turn["choices"][0]["token_ids"], turn["choices"][0]["message"]["content"])
"""


def run_demo(
    host: str,
    port: int,
    serve: bool,
    keep_log: Path | None,
    api_server_count: int = 2,
    url: str | None = None,
) -> int:
    """Start a stack, show on it that token and chat route keep their ids, and stop it.

    Results go to stdout, progress to stderr.

    Args:
        host: address for the engine to listen on.
        port: its port; 0 picks a free one.
        serve: instead of the conversations, say how to use the stack and keep it until Ctrl-C.
        keep_log: file for vLLM's log, which stays; None drops the log.
        api_server_count: API server processes of vLLM.
        url: use this running server, with or without `/v1`, instead of starting one.

    Returns:
        0 if every follow-up turn of both routes was exact; 1 if one was not; 2 if the stack did not
        start or did not answer; 130 if it was interrupted before that was known.
    """
    say = say_stderr
    try:
        with _terminable():
            if url is not None:
                if serve:
                    raise DemoError("--serve starts a server, --url uses one that runs: give one of them")
                return _compare(url.rstrip("/").removesuffix("/v1"), say)
            with EngineProcess(
                ensure_checkpoint(say=say),
                host=host,
                port=port,
                api_server_count=api_server_count,
                log_file=keep_log,
            ) as engine:
                engine.wait_ready(say=say)
                return _serve(engine, say) if serve else _compare(engine.url, say)
    except DemoError as error:
        say(f"tokenproxy demo: {error}")
        if isinstance(error, EngineStartError) and keep_log is None:
            say("--log FILE keeps the whole log of vLLM")
        return _NOT_RUN
    except KeyboardInterrupt:
        say("interrupted")
        return 130


def _compare(url: str, say: Say) -> int:
    """Hold the conversations and print the table.

    Raises:
        ConversationError: the server does not answer, or does not have the routes.
    """
    # The engine reads the same variable, and then wants the key from its clients.
    key = os.environ.get("VLLM_API_KEY") or "none"
    client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    model = _served_model(client, url)
    started = time.monotonic()
    tokens = converse(TokenRoute(client), model, say=say)
    chat = converse(ChatRoute(client), model, say=say)
    stock = converse(StockRoute(client), model, say=say)
    print(render(chat, stock))
    print(summary(tokens))
    say(f"the three conversations took {time.monotonic() - started:.0f} s")
    return _EXACT if all(ours.exact == ours.follow_ups for ours in (tokens, chat)) else _BROKEN


def _served_model(client: OpenAI, url: str) -> str:
    try:
        models = client.models.list().data
    except OpenAIError as error:
        raise ConversationError(f"no OpenAI server answers at {url}: {error}") from error
    if not models:
        raise ConversationError(f"the server at {url} serves no model")
    return models[0].id


def _serve(engine: EngineProcess, say: Say) -> int:
    print(f"serving {MODEL_NAME} at {engine.url}/v1 until Ctrl-C; from Python:\n")
    print(_HOW_TO.format(url=engine.url, model=MODEL_NAME), flush=True)
    try:
        while True:
            engine.check_alive()
            time.sleep(1.0)
    except KeyboardInterrupt:
        say("stopping")
    return _EXACT


@contextmanager
def _terminable() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C in the block: a job that is cancelled must not leave an engine behind."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
