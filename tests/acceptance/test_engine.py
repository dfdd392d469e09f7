"""What the product relies on in vLLM, shown on the stock engine alone."""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import httpx
import pytest

from tests.acceptance.conftest import Server
from tests.acceptance.formats import MODEL, events_of
from tests.support.talk import CHAT, user

_IDS = [1, 4093, 198, 2683, 2, 198, 1, 520, 9531, 198]
"""Ids of a ChatML prompt that no tokenizer would produce from its text."""
_STOP = 2
_BLOCK = 128
"""Ids in a block of the engine's prefix cache."""


@pytest.fixture
def stock(servers: Mapping[str, Server]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=servers["in front"].engine.url, timeout=90) as http:
        yield http


def _ask(stock: httpx.Client, ids: list[int], **fields: Any) -> list[dict[str, Any]]:
    exact = {"kv_transfer_params": {"prompt_token_ids": ids}, "return_token_ids": True}
    body = {"model": MODEL, "messages": [user("Ignored.")], "max_tokens": 2, **exact, **fields}
    answer = stock.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    return events_of(answer)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_ids_are_consumed_as_given_and_echoed(stock: httpx.Client, stream: bool) -> None:
    """In a stream the prompt is in the first event, and the sampled ids are deltas."""
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    first, *rest = _ask(stock, _IDS, stream=stream, ignore_eos=True, **usage)
    assert first["prompt_token_ids"] == _IDS
    assert all(event.get("prompt_token_ids") is None for event in rest)
    choices = chain.from_iterable(event["choices"] for event in [first, *rest])
    assert sum(len(choice.get("token_ids") or []) for choice in choices) == 2
    counted = (rest or [first])[-1]["usage"]
    assert (counted["prompt_tokens"], counted["completion_tokens"]) == (len(_IDS), 2)


def test_the_stop_token_is_among_the_sampled_ids_and_not_in_the_text(stock: httpx.Client) -> None:
    [answer] = _ask(stock, _IDS, allowed_token_ids=[_STOP])
    [choice] = answer["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == ([_STOP], "stop")
    assert not choice["message"]["content"]


def test_whole_blocks_of_a_prefix_come_out_of_the_cache(stock: httpx.Client) -> None:
    prompt = [1, *range(2000, 2000 + _BLOCK)]
    counted = [
        _ask(stock, ids, max_tokens=1)[0]["usage"]["prompt_tokens_details"]
        for ids in (prompt, [*prompt, 198])
    ]
    assert counted[1]["cached_tokens"] == _BLOCK


@pytest.mark.parametrize("ids", [[1, 49152], [5] * 9000], ids=["of no token", "beyond the context"])
def test_ids_that_cannot_be_consumed_are_refused(stock: httpx.Client, ids: list[int]) -> None:
    fields = {"messages": [user("Hi")], "kv_transfer_params": {"prompt_token_ids": ids}, "max_tokens": 1}
    assert stock.post(CHAT, json=fields).status_code == 400
