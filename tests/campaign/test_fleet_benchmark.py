"""The engine model of the fleet benchmark, on which its numbers rest."""

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.fleet_choosers import Chooser, Idea, RoundRobin, Sticky
from benchmarks.fleet_load import GROUP, make_load
from benchmarks.fleet_model import BLOCK_IDS, EngineModel, Job, PrefixCache, Speed
from benchmarks.fleet_policy import POLICIES
from benchmarks.fleet_simulation import Outcome, Simulation
from benchmarks.fleet_speeds import FAST, fleet_speeds
from benchmarks.fleet_words import Message, Words
from tests.campaign.benchmark_commands import linux, run_benchmark
from tokenization import ChatTokenizer

_SPEED = Speed(
    prefill_per_s=1000, decode_per_s=100, half=1, during_prefill=0.5, running=2, capacity_ids=8 * BLOCK_IDS
)


def _job(name: str, prompt_ids: int, completion_ids: int) -> Job:
    full = (prompt_ids + completion_ids) // BLOCK_IDS
    return Job([(name, number) for number in range(full)], prompt_ids, completion_ids)


def _run(engine: EngineModel) -> list[tuple[float, Job]]:
    """Let time pass until nothing runs; the requests with the times at which they ended."""
    ended = []
    while (change := engine.next_change()) is not None:
        ended += [(change, job) for job in engine.advance(change)]
    return ended


def test_request_alone_takes_prefill_and_decode() -> None:
    engine = EngineModel(_SPEED)
    engine.submit(0.0, _job("a", 500, 100))
    ((end, _),) = _run(engine)
    assert end == pytest.approx(500 / 1000 + 100 / (100 / 2))


def test_cached_prefix_is_not_prefilled() -> None:
    engine = EngineModel(_SPEED)
    engine.submit(0.0, _job("a", 3 * BLOCK_IDS, BLOCK_IDS))
    ((first, _),) = _run(engine)
    engine.submit(first, _job("a", 4 * BLOCK_IDS + 100, 10))
    ((second, job),) = _run(engine)
    assert job.cached_ids == 4 * BLOCK_IDS
    assert second - first == pytest.approx(100 / 1000 + 10 / (100 / 2))
    assert engine.totals.cached_ids == 4 * BLOCK_IDS


def test_at_least_one_id_of_a_prompt_is_computed() -> None:
    engine = EngineModel(_SPEED)
    for at in (0.0, 100.0):
        engine.advance(at)
        engine.submit(at, _job("a", 2 * BLOCK_IDS, 10))
        ((_, job),) = _run(engine)
    assert job.cached_ids == 2 * BLOCK_IDS - 1


def test_third_request_waits_for_one_of_two() -> None:
    engine = EngineModel(_SPEED)
    jobs = [_job(name, 1, ids) for name, ids in (("a", 100), ("b", 200), ("c", 10))]
    for job in jobs:
        engine.submit(0.0, job)
    assert (engine.running, engine.waiting) == (2, 1)
    ended = _run(engine)
    assert [job for _, job in ended] == [jobs[0], jobs[2], jobs[1]]
    assert engine.totals.longest_queue == 1


def test_sequences_slow_each_other_down() -> None:
    engine = EngineModel(_SPEED)
    for name in ("a", "b"):
        engine.submit(0.0, _job(name, 1, 100))
    (_, (end, _)) = _run(engine)
    assert end == pytest.approx(100 / (100 / 3), rel=0.01)


def test_cache_evicts_the_least_recently_used_blocks_and_none_in_use() -> None:
    cache = PrefixCache(4 * BLOCK_IDS)
    cache.hold(["a0", "a1"])
    cache.release(["a0", "a1"])
    cache.hold(["b0", "b1"])
    cache.hold(["c0"])
    assert cache.cached_blocks(["a0", "a1"]) == 1  # the end went first
    assert not cache.fits(["d0", "d1"])
    cache.hold(["d0"])
    assert cache.cached_blocks(["a0"]) == 0
    assert cache.cached_blocks(["b0", "b1"]) == 2


def test_load_is_the_same_every_time_and_grows_by_its_turns() -> None:
    load = make_load(64)
    assert load == make_load(64)
    assert load != make_load(64, seed=1)
    for conversation in load:
        for turn in range(1, len(conversation.turns)):
            before, after = conversation.blocks(turn - 1), conversation.blocks(turn)
            assert after[: len(before)] == before
    grouped = [conversation for conversation in load if conversation.group == 0]
    assert len(grouped) == GROUP
    shared = grouped[0].opening_ids // BLOCK_IDS
    assert len({tuple(conversation.blocks(0)[:shared]) for conversation in grouped}) == 1
    assert grouped[0].blocks(1)[shared + 1 :] != grouped[1].blocks(1)[shared + 1 :]


def _simulated(chooser: Chooser, slow: int = 3) -> Outcome:
    return Simulation(make_load(120), fleet_speeds(slow=slow), chooser, 48).run()


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_serves_every_turn(name: str) -> None:
    load = make_load(40)
    outcome = Simulation(load, fleet_speeds(), POLICIES[name](8), 16).run()
    assert len(outcome.latencies_s) == sum(len(conversation.turns) for conversation in load)
    assert sum(totals.requests for totals in outcome.totals) == len(outcome.latencies_s)
    sampled = sum(turn.completion_ids for conversation in load for turn in conversation.turns)
    assert sum(totals.completion_ids for totals in outcome.totals) == sampled


def test_simulation_is_deterministic_and_tells_policies_apart() -> None:
    sticky = Idea(measured=True, move=0.7)
    first, second = _simulated(Sticky(8, sticky)), _simulated(Sticky(8, sticky))
    assert first.latencies_s == second.latencies_s
    round_robin = _simulated(RoundRobin(8))
    assert first.makespan_s < 0.7 * round_robin.makespan_s
    assert first.hit_rate > round_robin.hit_rate + 0.2


def test_words_render_as_their_tokenizer_does(tmp_path: Path) -> None:
    """The engines render with `Words`, the proxy with the tokenizer that it wrote."""
    words, draw = Words(), random.Random(1)
    words.write(tmp_path)
    text, sampled = words.sample(draw, 40)
    call = {"id": "call_1", "type": "function", "function": {"name": "run", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": words.text(draw, 20)},
        {"role": "user", "content": words.text(draw, 30)},
        {"role": "assistant", "content": text, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": words.text(draw, 50)},
    ]
    tokenizer = ChatTokenizer.load(str(tmp_path))
    prompt, whole = tokenizer.render(messages[:2]), tokenizer.render(messages)
    assert list(words.render(msgspec.convert(messages, list[Message]))) == whole
    assert whole[: len(prompt) + len(sampled)] == [*prompt, *sampled]


def test_simulation_command_prints_a_row_for_each_policy() -> None:
    run = run_benchmark("benchmarks/fleet_simulation.py", "--conversations", "24", "--connections", "12")
    assert run.returncode == 0, run.stderr
    assert all(f"| {name} " in run.stdout for name in POLICIES)


def test_unknown_policy_error_lists_the_policies() -> None:
    run = run_benchmark("benchmarks/fleet.py", "--only", "no such")
    assert run.returncode == 2
    assert '"tokenproxy sticky_least_loaded"' in run.stderr


@pytest.mark.slow
@linux
@pytest.mark.timeout(300)
def test_quick_fleet_run_is_exact_and_counts_every_turn(tmp_path: Path) -> None:
    written = tmp_path / "out.json"
    run = run_benchmark("benchmarks/fleet.py", "--quick", "--only", "tokenproxy", "--json", str(written))
    assert run.returncode == 0, run.stderr
    policies = json.loads(written.read_text())["policies"]
    assert [row["policy"].split()[1] for row in policies] == [
        "round_robin",
        "least_loaded",
        "two_choices",
        "sticky_least_loaded",
    ]
    for row in policies:
        (held,), (totals,) = row["held"], row["totals"]
        assert sum(replica["requests"] for replica in totals) == len(held["latencies_s"])
        assert held["extended"] == len(held["latencies_s"]) - held["begun"]
        assert held["prompt_ids"] == sum(replica["prompt_ids"] for replica in totals)


@pytest.mark.slow
@linux
@pytest.mark.timeout(300)
def test_short_soak_has_no_errors(tmp_path: Path) -> None:
    written = tmp_path / "out.json"
    run = run_benchmark("benchmarks/soak.py", "--minutes", "0.2", "--json", str(written))
    assert run.returncode == 0, run.stdout + run.stderr
    soaked = json.loads(written.read_text())
    assert soaked["errors"] == []
    assert soaked["turns"] > soaked["begun"] > 0
    assert soaked["extended"] == soaked["turns"] - soaked["begun"]
    assert all(third["rss_mib"] for third in soaked["thirds"])
    assert "| memory, last third / first " in run.stdout


def test_speeds_of_a_fleet_have_the_slow_ones_spread() -> None:
    speeds = fleet_speeds(slow=3)
    assert [speed.prefill_per_s == FAST.prefill_per_s for speed in speeds].count(False) == 3
    assert fleet_speeds(slow=0) == [FAST] * 8
