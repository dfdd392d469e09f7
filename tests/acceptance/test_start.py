"""Both engines start, once for the whole layer. It has a test of its own because it takes longest."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.acceptance.conftest import START_TIMEOUT_S, Server
from tests.support.talk import CHAT, user


@pytest.mark.timeout(START_TIMEOUT_S)
def test_engines_start_and_report_how_ids_are_sent(servers: dict[str, Server]) -> None:
    for way, server in servers.items():
        state = server.http.get("/ready").json()
        [engine] = state["engines"]
        assert (engine["token_in"], engine["model"]) == ("chat", "smollm2"), state
        assert engine["engine"] == ("in-process" if way == "inside" else server.engine.url)


@pytest.mark.timeout(START_TIMEOUT_S)
def test_first_requests_are_answered(servers: dict[str, Server]) -> None:
    """The first completion of an engine takes longest."""
    body = {"messages": [user("Hi.")], "max_tokens": 2}
    with ThreadPoolExecutor(len(servers)) as threads:
        answers = threads.map(
            lambda each: each.http.post(CHAT, json=body, timeout=START_TIMEOUT_S), servers.values()
        )
        assert [answer.status_code for answer in answers] == [200] * len(servers)
