"""How much memory turns take in Redis, next to what the store counts. `docs/redis.md` has the numbers."""

import json
import random
from pathlib import Path

import pytest
import redis

from tests.support.redis_server import run_redis
from tests.support.store_utils import add, entry, make_session, make_turn, opened, usage
from tests.support.utils import wait_until
from tokenproxy.record.turn import IndexedTurn, Turn, pack_ids, pack_logprobs

_TURNS_OF_A_ROLLOUT = 6


def _turn(chance: random.Random, rollout: str, count: int, logprobs: bool, parent: str | None) -> Turn:
    """A turn of so many ids, a quarter of them sampled, with text of about as many words."""
    ids = [min(149_999, int(chance.paretovariate(0.7))) for _ in range(count)]
    text = " ".join(f"word{each:x}"[-6:] for each in ids)
    sampled = count // 4
    return make_turn(
        rollout,
        parent=parent,
        appended=pack_ids(ids[sampled:]),
        completion=pack_ids(ids[:sampled]),
        logprobs=pack_logprobs([-chance.expovariate(1) for _ in range(sampled)] if logprobs else []),
        messages=json.dumps([{"role": "user", "content": text[len(text) // 4 :]}]).encode(),
        message=json.dumps({"role": "assistant", "content": text[: len(text) // 4]}).encode(),
        prompt_tokens=count,
        replica="http://10.0.0.1:8000",
        scope=(b"s" * 16,) * 4,
        ids_digest=b"d" * 16,
    )


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("count", [16, 1000, 32_000])
async def test_the_documented_bound_holds(tmp_path: Path, count: int, logprobs: bool) -> None:
    chance, turns = random.Random(count), max(60, min(600, 500_000 // count))
    with run_redis(tmp_path, "--zset-max-listpack-value", "128") as port, redis.Redis(port=port) as client:
        url = f"redis://127.0.0.1:{port}/0"
        async with opened(url) as store:
            # what is there once, such as the scripts
            await add(store, make_turn("first"), entry("first", "ids"))
            counted_at_start = (await usage(store)).size
        # connections take memory too: none is open but this one
        start = client.info("memory")["used_memory"]
        async with opened(url) as store:
            parent = None
            for number in range(turns):
                if number % _TURNS_OF_A_ROLLOUT == 0:
                    parent = None
                rollout = f"{'t' * 16}/{number // _TURNS_OF_A_ROLLOUT:032}"
                turn = _turn(chance, rollout, count, logprobs, parent)
                parent = turn.id
                entries = [entry(f"{turn.id}a", "i"), entry(f"{turn.id}b", "i"), entry(f"{turn.id}c")]
                await store.add(make_session(rollout, tenant="t" * 16), [IndexedTurn(turn, entries)])
            counted = (await usage(store)).size - counted_at_start
        wait_until(lambda: client.info("clients")["connected_clients"] == 1)
        used = client.info("memory")["used_memory"] - start
    print(f"{used / turns:.0f} bytes a turn, {counted / turns:.0f} counted")
    assert counted < used < 1.3 * counted + 1600 * turns + 100_000
