"""The feed of finished rollouts on a real vLLM: its samples hold what the engine consumed and sampled."""

import itertools
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from proxy.client import AsyncClient, Client, FeedRollout, TokenTurn
from tests.campaign.real_vllm.conftest import Served

_MODEL = "smollm2"


@contextmanager
def _follow(server: Served, out: Path, run: str, *flags: str) -> Iterator["subprocess.Popen[str]"]:
    """`tokenproxy export --follow` on the store of a server."""
    command = [sys.executable, "-m", "proxy.cli", "export", "--follow", "--out", str(out)]
    selected = ("--metadata", f"run={run}")
    environment = {**os.environ, **server.recorder}
    process = subprocess.Popen(
        [*command, *selected, *flags], env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _stop(process: "subprocess.Popen[str]") -> str:
    """End an export; the cursor that it printed."""
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    [cursor] = re.findall(r"continue with --after (\d+)", err)
    return str(cursor)


def _rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def _wait_rows(out: Path, count: int) -> list[dict[str, Any]]:
    deadline = time.monotonic() + 60
    while len(rows := _rows(out)) < count:
        assert time.monotonic() < deadline, rows
        time.sleep(0.1)
    return rows


def _by_ids(client: Client, name: str, run: str) -> TokenTurn:
    """A rollout of two turns over the token route; its last turn."""
    client.create_session(name, metadata={"run": run})
    question = [{"role": "user", "content": f"Name a colour ({name})."}]
    options: dict[str, Any] = {"model": _MODEL, "session": name, "temperature": 1.2, "max_tokens": 12}
    first = client.token_turn(messages=question, **options)
    more = [{"role": "user", "content": "And another one?"}]
    second = client.token_turn(first.ids, more, **options)
    assert second.prompt_ids[: len(first.ids)] == first.ids
    assert second.logprobs is not None and len(second.logprobs) == len(second.completion_ids)
    return second


def _by_text(server: Served, client: Client, name: str, run: str) -> None:
    """A rollout of two turns of a plain OpenAI client with streams."""
    client.create_session(name, metadata={"run": run})
    agent = server.client().with_options(base_url=f"{server.url}/sessions/{name}/v1")
    messages: list[Any] = [{"role": "user", "content": "Hello!"}]
    for _ in range(2):
        stream = agent.chat.completions.create(
            model=_MODEL, messages=messages, max_tokens=12, temperature=1.2, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]


def _check(rollouts: Sequence[FeedRollout], last: dict[str, TokenTurn], rewards: dict[str, float]) -> None:
    for rollout in rollouts:
        assert rollout.refused == []
        [sample] = rollout.samples
        assert len(sample["turns"]) == 2 and sample["revision"] == rollout.revision
        assert sample["reward"] == rewards.get(rollout.rollout)
        count = len(sample["completion_ids"])
        assert count == len(sample["loss_mask"]) == len(sample["logprobs"])
        turn = last.get(rollout.rollout)
        if turn is not None:
            assert sample["prompt_ids"] + sample["completion_ids"] == turn.ids
            sampled = len(turn.completion_ids)
            assert sample["loss_mask"][-sampled:] == [1] * sampled
            assert sample["logprobs"][-sampled:] == turn.logprobs


def _names(rollouts: Sequence[FeedRollout]) -> list[str]:
    return [rollout.rollout for rollout in rollouts]


async def test_trainers_get_every_finished_rollout(server: Served, tmp_path: Path) -> None:
    run = secrets.token_hex(4)
    names = [f"{run}-{number}" for number in range(4)]
    rewards = {names[2]: 1.0, names[0]: 0.0}
    trainers, out = (f"one-{run}", f"two-{run}"), tmp_path / "followed.jsonl"
    with (
        Client(server.url) as client,
        _follow(server, out, run) as following,
        ThreadPoolExecutor(4) as threads,
    ):
        ids = [threads.submit(_by_ids, client, name, run) for name in names[:3]]
        text = threads.submit(_by_text, server, client, names[3], run)
        last = {name: turn.result() for name, turn in zip(names, ids, strict=False)}
        text.result()
        assert client.read_feed(metadata={"run": run}, wait_s=0.0).data == []
        feed = client.feed(trainers[0], limit=1, metadata={"run": run})
        waiting = threads.submit(lambda: next(feed))
        for name, reward in rewards.items():
            client.set_reward(name, reward)
        first = waiting.result(60)
        for name in (names[3], names[1]):
            assert client.end_session(name) is True
        order = [names[2], names[0], names[3], names[1]]
        rollouts = [first, *itertools.islice(feed, 3)]
        assert _names(rollouts) == order
        assert [rollout.cause for rollout in rollouts] == ["reward", "reward", "end", "end"]
        assert {rollout.metadata["run"] for rollout in rollouts} == {run}
        _check(rollouts, last, rewards)

        # the last one was not acknowledged: a trainer that starts again gets it again
        again = next(client.feed(trainers[0], metadata={"run": run}))
        assert again == rollouts[-1]

        # another trainer has its own cursor, and asyncio
        second: list[FeedRollout] = []
        async with AsyncClient(server.url) as other:
            async for rollout in other.feed(trainers[1], metadata={"run": run}):
                second.append(rollout)
                if len(second) == 4:
                    await other.acknowledge(trainers[1], rollout.cursor)
                    break
            assert second == rollouts
            _wait_rows(out, 4)
            client.set_reward(names[1], 0.5)
            async for rollout in other.feed(trainers[1], metadata={"run": run}):
                assert (rollout.rollout, rollout.revision, rollout.cause) == (names[1], 2, "reward")
                _check([rollout], last, {**rewards, names[1]: 0.5})
                break

        rows = _wait_rows(out, 5)
        cursor = _stop(following)
        assert [row["rollout"] for row in rows] == [*order, names[1]]
        assert [row["revision"] for row in rows] == [1, 1, 1, 1, 2]
        assert rows[:4] == [sample for rollout in rollouts for sample in rollout.samples]
        client.set_reward(names[1], 0.75)
        with _follow(server, out, run, "--after", cursor) as following:
            assert [row["reward"] for row in _wait_rows(out, 6)[5:]] == [0.75]
            _stop(following)
        for trainer in trainers:
            client.forget_consumer(trainer)
