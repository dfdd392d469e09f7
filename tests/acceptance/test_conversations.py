"""Every follow-up of a conversation is exact, in every wire format, inside vLLM and in front of it.

    prompt[t + 1] == prompt[t] + completion[t] + appended[t + 1]

It is shown by the session's record together with what the engine itself reports: the ids that it echoes, and
its counts where a format has no ids. All conversations run at the same time, before the first one is checked.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from uuid import uuid4

import pytest

from tests.acceptance.conftest import WAYS, Server
from tests.acceptance.formats import FORMATS, TURNS, Conversation
from tests.support.recorded import record_of


def _converse(conversation: Conversation, server: Server) -> Conversation:
    for _ in range(TURNS):
        conversation.ask(server.http)
    return conversation


@pytest.fixture(scope="module")
def conversations(servers: Mapping[str, Server]) -> dict[tuple[str, str], "Future[Conversation]"]:
    """All conversations, ended: by format and way to run."""
    with ThreadPoolExecutor(len(FORMATS) * len(WAYS)) as threads:
        ended = {
            (name, way): threads.submit(_converse, kind(f"{kind.__name__}-{uuid4().hex}"), servers[way])
            for name, kind in FORMATS.items()
            for way in WAYS
        }
        wait(ended.values())
    return ended


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FORMATS)
def test_every_follow_up_is_exact(
    conversations: dict[tuple[str, str], "Future[Conversation]"],
    servers: Mapping[str, Server],
    name: str,
    way: str,
) -> None:
    conversation = conversations[name, way].result()
    record = record_of(servers[way].http, conversation.session(), TURNS)
    for turn, (prompt, sampled), seen in zip(
        record.turns, record.check_exact(), conversation.seen, strict=True
    ):
        assert seen.prompt_tokens in (None, len(prompt))
        assert seen.completion_tokens in (None, len(sampled))
        assert (seen.prompt_ids or seen.prompt_tokens or seen.sent) is not None
        if seen.sent is not None:
            assert (seen.sent, seen.ids) == (prompt, sampled)
        if seen.prompt_ids is not None:
            assert (seen.prompt_ids, seen.ids) == (prompt, sampled)
        if conversation.has_headers:
            assert seen.headers["x-prompt-source"] == turn["source"]
            reused = len(prompt) if turn["source"] == "given" else turn["reused"]
            assert seen.headers["x-prompt-reused"] == str(reused)
    sources = [turn["source"] + (f": {turn['reason']}" if turn["reason"] else "") for turn in record.turns]
    assert sources == list(conversation.sources)
