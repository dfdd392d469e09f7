"""A client that leaves a stream: the engine stops, and what it sampled until then is recorded."""

from uuid import uuid4

import httpx

from tests.acceptance.conftest import Server, running
from tests.acceptance.formats import MODEL, Fields, stream_of
from tests.support.recorded import record_of
from tests.support.talk import CHAT, user
from tests.support.utils import wait_until
from tokenproxy.demo.stack import EngineProcess

_PATIENCE_S = 90.0


def _works_on_nothing(engine: EngineProcess) -> bool:
    """An engine counts its requests anew in each step only: it gets one, so that no old count stays."""
    step = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    httpx.post(f"{engine.url}/v1/completions", json=step, timeout=60).raise_for_status()
    return running(engine) == 0


def test_an_abandoned_stream_is_aborted_and_recorded(server: Server) -> None:
    """3,000 tokens take minutes on this engine: only an abort brings its running requests back to none."""
    wait_until(lambda: _works_on_nothing(server.engine), _PATIENCE_S)
    session = uuid4().hex
    body: Fields = {
        **{"model": MODEL, "messages": [user(f"Tell a long story about {session}.")], "max_tokens": 3000},
        **{"ignore_eos": True, "stream": True, "return_token_ids": True},
    }
    received: list[int] = []
    prompt: list[int] = []
    with server.http.stream("POST", CHAT, json=body, headers={"x-session-id": session}) as response:
        for event in stream_of(response):
            prompt = event.get("prompt_token_ids") or prompt
            received += [token for choice in event["choices"] for token in choice.get("token_ids") or []]
            if len(received) >= 4:
                wait_until(lambda: running(server.engine) == 1, _PATIENCE_S)
                break
    wait_until(lambda: _works_on_nothing(server.engine), _PATIENCE_S)
    [turn] = record_of(server.http, session, 1).turns
    assert (turn["finish_reason"], turn["problem"]) == ("abort", None)
    assert turn["appended_ids"] == prompt
    assert turn["completion_ids"][: len(received)] == received
    assert len(turn["logprobs"]) == len(turn["completion_ids"]) < body["max_tokens"]
