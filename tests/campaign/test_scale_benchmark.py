"""The parts of the simulation of `benchmarks/simulate.py`, against queueing theory and arithmetic."""

import itertools
import json
import random
from pathlib import Path

import pytest
import simpy

from benchmarks.fleet_model import Speed
from benchmarks.scale_case import Case
from benchmarks.scale_clients import write_script
from benchmarks.scale_costs import CPU_QUANTITIES, QUANTITIES, Costs, Curve, TurnCosts, TurnKind, interpolate
from benchmarks.scale_model import (
    CaseSimulation,
    Deployment,
    DeploymentSimulation,
    Engine,
    Load,
    Outcome,
    Server,
    Steps,
)
from benchmarks.scale_plan import Planner, Targets, crossed, default_load, slices_of
from benchmarks.scale_report import PAGE, put_into
from benchmarks.simulate import COSTS
from tests.campaign.benchmark_commands import linux, run_benchmark

_SPEED = Speed(
    prefill_per_s=1e9, decode_per_s=1000, half=0, during_prefill=1, running=10_000, capacity_ids=1 << 40
)


def _costs(proxy_ms: float = 2.0, *, redis_ms: float = 0.0, apart_ms: float = 0.0) -> Costs:
    """The same for every turn."""
    values = dict.fromkeys(QUANTITIES, 0.0) | {"proxy_ms": proxy_ms, "redis_ms": redis_ms}
    curves = {name: Curve(((1, value),), ((1, value),)) for name, value in values.items()}
    apart = dict.fromkeys(CPU_QUANTITIES, 0.0) | {"proxy_ms": apart_ms}
    ways = ("Redis whole", "Redis stream", "memory whole")
    return Costs({}, {way: TurnCosts(curves, apart) for way in ways}, search_ms=0.01, probe_ms=0.1)


def _mean_wait(load: float, *, exponential: bool, customers: int = 40_000) -> float:
    """Mean time in the line of a server with work of 1 s on average, over that work; arrivals at random."""
    environment, draw, waits = simpy.Environment(), random.Random(7), []
    server = Server(environment)

    def customer(work_s: float) -> Steps:
        begun = environment.now
        yield from server.work(1000 * work_s)
        waits.append(environment.now - begun - work_s)

    def arrivals() -> Steps:
        for _ in range(customers):
            yield environment.timeout(draw.expovariate(load))
            environment.process(customer(draw.expovariate(1.0) if exponential else 1.0))

    environment.process(arrivals())
    environment.run()
    assert server.served == customers
    return sum(waits) / customers


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_constant_work_waits_as_in_an_md1_queue(load: float) -> None:
    assert _mean_wait(load, exponential=False) == pytest.approx(load / (2 * (1 - load)), rel=0.05)


@pytest.mark.parametrize("load", [0.5, 0.7])
def test_exponential_work_waits_as_in_an_mm1_queue(load: float) -> None:
    assert _mean_wait(load, exponential=True) == pytest.approx(load / (1 - load), rel=0.07)


def test_almost_full_process_waits_twenty_times_as_long_as_a_half_full_one() -> None:
    half, full = (_mean_wait(load, exponential=False, customers=100_000) for load in (0.5, 0.95))
    assert full / half == pytest.approx((0.95 / 0.1) / 0.5, rel=0.15)


def test_step_costs_more_at_an_idle_process() -> None:
    environment = simpy.Environment()
    server = Server(environment)
    for _ in range(3):
        environment.process(server.work(10.0, 5.0))
    environment.run()
    assert [server.busy_s, environment.now] == pytest.approx([0.035, 0.035])


def test_slower_process_takes_longer_but_uses_the_same_cpu() -> None:
    environment = simpy.Environment()
    server = Server(environment, speed=0.5)
    environment.process(server.work(10.0))
    environment.run()
    assert [server.busy_s, environment.now] == pytest.approx([0.01, 0.02])


def _run(case: Case, costs: Costs) -> Outcome:
    return CaseSimulation(case, costs).run()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_every_turn_is_taken_once_and_all_its_work_is_done(stream: bool) -> None:
    case = Case("all", 20, 7, 1000, 400, 200, stream, think_s=0.01, service_s=0.02)
    outcome = _run(case, _costs(2.0))
    assert outcome.turns == len(outcome.added_s) == 140
    assert outcome.proxy_ms == pytest.approx(2.0)
    assert min(outcome.added_s) >= 0


def test_full_process_bounds_the_rate_and_an_empty_one_does_not() -> None:
    full = _run(Case("full", 100, 20, 1000, 400, 200, think_s=0.01, service_s=0.01), _costs(2.0))
    assert full.per_second == pytest.approx(500, rel=0.02)
    idle = _run(Case("idle", 1, 20, 1000, 400, 200, service_s=0.098), _costs(2.0))
    assert idle.per_second == pytest.approx(10)
    assert idle.added_s == pytest.approx([0.002] * 20)


def test_other_programs_slow_a_core_only_where_it_has_too_little_left() -> None:
    case = Case("shared", 10, 20, 1000, 400, 200, think_s=0.05, service_s=0.05)
    alone = _run(case, _costs(2.0))
    assert CaseSimulation.beside(case, _costs(2.0), (0.5, 0.5)).seconds == alone.seconds
    assert CaseSimulation.beside(case, _costs(2.0), (0.9, 0.5)).seconds > alone.seconds


def test_simulation_is_the_same_each_time() -> None:
    case = Case("again", 10, 5, 1000, 400, 200, think_s=0.05, service_s=0.05)
    assert _run(case, _costs()).added_s == _run(case, _costs()).added_s


def test_engine_ends_requests_when_its_model_does() -> None:
    environment = simpy.Environment()
    engine, ends = Engine(environment, _SPEED), []

    def request(at: float) -> Steps:
        yield environment.timeout(at)
        yield engine.serve(1, 100)
        ends.append(environment.now)

    environment.process(request(0.0))
    environment.process(request(10.0))
    environment.process(request(10.0))
    environment.run()
    assert ends == pytest.approx([0.1, 10.2, 10.2], abs=1e-3)  # two share the speed


def test_part_of_a_deployment_is_as_busy_as_the_whole() -> None:
    steady = Speed(
        prefill_per_s=1e9, decode_per_s=1e8, half=1e5, during_prefill=1, running=100, capacity_ids=1 << 40
    )
    load = Load(Case("part", 0, 5, 1000, 400, 50, think_s=1.0), steady)
    planner = Planner(load, _costs(5.0, redis_ms=0.5), Targets())
    needs = planner.needs(1_000)
    assert needs.processes >= 4
    whole, part = planner.simulate(needs, 1), planner.simulate(needs, needs.processes)
    assert part.per_second == pytest.approx(whole.per_second, rel=0.05)
    assert part.proxy_busy == pytest.approx(whole.proxy_busy, rel=0.1)
    assert part.redis_busy == pytest.approx(whole.redis_busy, rel=0.1)


def test_deployment_has_the_rate_of_a_closed_loop() -> None:
    load = Load(Case("loop", 0, 4, 100, 100, 100, think_s=0.9), _SPEED)
    deployment = Deployment(rollouts=50, processes=2, shards=1, engines=50)
    outcome = DeploymentSimulation(load, _costs(1.0), deployment).run(10.0, 60.0)
    assert outcome.per_second == pytest.approx(50 / (0.9 + 0.1 + 0.001), rel=0.03)
    assert outcome.proxy_ms == pytest.approx(1.0, rel=0.01)


def test_needs_are_the_work_over_the_targets() -> None:
    planner = Planner(
        default_load(Case("needs", 0, 5, 1000, 400, 50, think_s=1.0)), _costs(5.0, redis_ms=0.5), Targets()
    )
    needs = planner.needs(20_000)
    watching = needs.engines * 0.1e-3 / 5
    assert needs.watching == pytest.approx(watching)
    assert needs.processes == pytest.approx(needs.turns_per_s * 5e-3 / (0.7 - watching), abs=1)
    assert needs.shards == pytest.approx(needs.turns_per_s * 0.5e-3 / 0.6, abs=1)
    blind = needs.shards_without_sessions
    assert blind is not None and blind > needs.shards
    # each shard does its own turns, and looks up all others in each of its four partitions
    load = needs.turns_per_s / blind * 0.5e-3 + needs.turns_per_s * (4 - 1 / blind) * 0.01e-3
    assert load <= 0.6
    assert planner.needs(10_000_000).shards_without_sessions is None
    assert slices_of(planner.needs(100)) == 1 and slices_of(needs) > 1


def test_limits_are_in_order_and_each_is_crossed_once() -> None:
    planner = Planner(
        default_load(Case("limits", 0, 5, 1000, 400, 50, think_s=1.0)), _costs(5.0, redis_ms=0.5), Targets()
    )
    limits = planner.limits()
    assert [limit.rollouts for limit in limits] == sorted(limit.rollouts for limit in limits)
    process = next(limit for limit in limits if limit.name == "one proxy process")
    assert process.rollouts == pytest.approx(200 * planner.period_s)
    steps = [0, 1_000, 10_000, float("inf")]
    found = [limit for low, high in itertools.pairwise(steps) for limit in crossed(limits, low, high)]
    assert len(found) <= len(limits) and len(set(map(id, found))) == len(found)


def test_costs_are_straight_lines_between_and_beyond_the_measurements() -> None:
    points = ((1000.0, 2.0), (8000.0, 9.0), (32_000.0, 33.0))
    assert [interpolate(points, at) for at in (500, 4500, 8000, 40_000)] == [1.5, 5.5, 9.0, 41.0]
    curve = Curve(first=((1000, 3.0), (2000, 5.0)), later=((1000, 2.0), (2000, 3.0)), per_completion_id=0.01)
    assert curve.of(TurnKind(1500, 400, 200)) == 2.5
    assert curve.of(TurnKind(1500, 1500, 300, first=True)) == pytest.approx(4 + 1)
    assert curve.of(TurnKind(1500, 600, 200)) == pytest.approx(2.5 + 200 * 0.001)


def test_costs_survive_their_file_and_a_missing_file_names_the_remedy(tmp_path: Path) -> None:
    costs = _costs()
    costs.write(tmp_path / "costs.json")
    assert Costs.read(tmp_path / "costs.json") == costs
    with pytest.raises(ValueError, match=r"simulate\.py calibrate"):
        Costs.read(tmp_path / "missing.json")


def test_costs_of_the_repository_are_complete() -> None:
    costs = Costs.read(COSTS)
    for store, stream in (("Redis", False), ("Redis", True), ("memory", False)):
        turn = costs.turn(store, stream)
        assert set(turn.curves) == set(QUANTITIES)
        assert turn.of("proxy_ms", TurnKind(1000, 400, 200)) > 0
    assert costs.search_ms > 0 and costs.probe_ms > 0


def test_page_has_a_place_for_every_table() -> None:
    page = PAGE.read_text()
    for part in ("costs", "validation", "plan"):
        assert "\nnew table\n" in put_into(page, part, "new table")
    with pytest.raises(ValueError, match="no lines"):
        put_into("# Empty", "plan", "new table")


class _Corpus:
    def take(self, count: int) -> list[tuple[int, str]]:
        return [(5, "a")] * count

    def text(self, count: int) -> str:
        return "a " * count


class _Tokenizer:
    def render(self, messages: list[dict[str, str]]) -> list[int]:
        return [1] * len(messages)

    def stop_id(self) -> int:
        return 2


@pytest.mark.parametrize("opening", [100, 1_000, 8_000])
def test_script_of_a_case_ends_with_a_question(opening: int) -> None:
    case = Case("script", 1, 3, opening, 400, 200)
    script = write_script(case, _Tokenizer(), _Corpus())  # type: ignore[arg-type]
    messages = json.loads(b"[" + script.opening + b"]")
    assert messages[0]["role"] == "system" and messages[-1]["role"] == "user"
    words = sum(len(message["content"].split()) for message in messages)
    assert words == pytest.approx(opening, rel=0.3)
    assert len(script.canned.ids) == 200 and script.canned.ids[-1] == 2


def test_quick_plan_prints_and_writes_its_tables(tmp_path: Path) -> None:
    written = tmp_path / "plan.json"
    run = run_benchmark("benchmarks/simulate.py", "plan", "--quick", "--json", str(written))
    assert run.returncode == 0, run.stderr
    assert "| 1,000 rollouts " in run.stdout and "one proxy process" in run.stdout
    rows = json.loads(written.read_text())["plan"]
    assert [row["needs"]["rollouts"] for row in rows] == [100, 1000]
    assert all(0 < each["proxy_busy"] < 1 for row in rows for each in row["simulated"])


@pytest.mark.slow
@pytest.mark.broad
@linux
@pytest.mark.timeout(400)
def test_quick_comparison_measures_and_simulates_each_case(tmp_path: Path) -> None:
    written = tmp_path / "out.json"
    arguments = ["validate", "--quick", "--json", str(written)]
    run = run_benchmark("benchmarks/simulate.py", *arguments, timeout_s=380, torch=True)
    assert run.returncode == 0, run.stderr
    results = json.loads(written.read_text())
    assert "| 40 rollouts, streamed " in run.stdout
    for values in results["validation"].values():
        assert all(real > 0 and simulated > 0 for real, simulated in (values["requests/s"], values["CPU ms"]))
