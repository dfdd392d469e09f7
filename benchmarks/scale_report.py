"""The tables of `simulate.py`, and how they get into docs/scale.md."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import machine_lines, table
from benchmarks.scale_calibrate import LENGTHS
from benchmarks.scale_costs import Costs, TurnCosts, TurnKind
from benchmarks.scale_plan import Limit, Needs, Planner, Simulated, crossed

PAGE = Path(__file__).resolve().parent.parent / "docs" / "scale.md"
COSTS, VALIDATION, PLAN = "costs", "validation", "plan"
"""The parts of the page that are made by the command."""
_LABELS = [f"{length // 1000}k" for length in LENGTHS]


def costs_text(costs: Costs) -> str:
    """What one process and one Redis server carry, and what a turn sends and stores."""
    parts = [
        "\n".join(machine_lines(costs.machine, f"; other programs used {costs.others:.0%} of the proxy's"))
    ]
    head = [
        "CPU ms of a turn after",
        *_LABELS,
        "first, 1k",
        "first, 32k",
        "+1,000 sampled",
        "if idle",
        "turns/s",
    ]
    parts.append(table([head, *(_cpu_row(f"proxy, {way}", turn) for way, turn in costs.turns.items())]))
    redis = costs.turns["Redis whole"]
    head = ["with Redis, of a turn after", *_LABELS, "first, 1k", "first, 32k"]
    rows = [head]
    for title, quantity, form in (
        ("CPU ms of Redis", "redis_ms", "{:.2f}"),
        ("KB of Redis' memory", "memory_bytes", "{:.1f}"),
        ("KB written to disk", "aof_bytes", "{:.1f}"),
        ("KB, proxy and Redis", "redis_bytes", "{:.1f}"),
        ("KB, client and proxy", "client_bytes", "{:.0f}"),
        ("KB, proxy and engine", "engine_bytes", "{:.0f}"),
    ):
        by = 1 if quantity == "redis_ms" else 1000
        rows.append([title, *(form.format(redis.of(quantity, kind) / by) for kind in _kinds())])
    streamed = costs.turns["Redis stream"]
    for title, quantity in (("client and proxy", "client_bytes"), ("proxy and engine", "engine_bytes")):
        cells = (f"{streamed.of(quantity, kind) / 1000:.0f}" for kind in _kinds())
        rows.append([f"KB, {title}, streamed", *cells])
    parts.append(table(rows))
    parts.append(
        f"One Redis server: {1000 / redis.of('redis_ms', _kinds()[0]):,.0f} turns/s on a full core, "
        f"{costs.scripts:.0f} requests of the proxy for a turn. A look-up costs it {costs.search_ms:.3f} ms. "
        f"A check of an engine's health costs a proxy process {costs.probe_ms:.3f} ms."
    )
    return "\n\n".join(parts)


def _kinds() -> list[TurnKind]:
    later = [TurnKind(length, 400, 200) for length in LENGTHS]
    return later + [TurnKind(length, length, 200, first=True) for length in (LENGTHS[0], LENGTHS[-1])]


def _cpu_row(name: str, turn: TurnCosts) -> list[str]:
    values = [turn.of("proxy_ms", kind) for kind in _kinds()]
    more = 1000 * turn.curves["proxy_ms"].per_completion_id
    cells = (f"{value:.2f}" for value in values)
    return [name, *cells, f"+{more:.1f}", f"+{turn.apart['proxy_ms']:.1f}", f"{1000 / values[0]:,.0f}"]


def plan_text(planner: Planner, needed: Sequence[tuple[Needs, Sequence[Simulated]]]) -> str:
    """The tables of a plan."""
    limits = planner.limits()
    head = ["concurrent rollouts", "turns/s", "proxy processes", "Redis shards", "the same, no session names"]
    head += ["engines", "Gbit/s", "Redis GB/h", "disk GB/h", "first limits above the row before"]
    rows, above = [head], 0.0
    for needs, _ in needed:
        blind = needs.shards_without_sessions
        names = "; ".join(
            f"{limit.name} ({_round(limit.rollouts)})" for limit in crossed(limits, above, needs.rollouts)
        )
        rows.append(
            [
                f"{needs.rollouts:,}",
                f"{needs.turns_per_s:,.0f}",
                f"{needs.processes:,}",
                f"{needs.shards:,}",
                "impossible" if blind is None else f"{blind:,}",
                f"{needs.engines:,}",
                f"{needs.gbit:,.2f}",
                f"{needs.memory_gb_per_h:,.1f}",
                f"{needs.disk_gb_per_h:,.1f}",
                names or "-",
            ]
        )
        above = needs.rollouts
    checks = [["simulated", "as", "turns/s", "planned", "proxy busy", "Redis busy", "added p50", "added p99"]]
    for needs, simulated in needed:
        checks += [_check_row(needs, each) for each in simulated]
    reached = [["limit", "at concurrent rollouts", "then"], *(_limit_row(limit) for limit in limits)]
    return "\n\n".join((table(rows), table(reached), table(checks)))


def _limit_row(limit: Limit) -> list[str]:
    return [limit.name, _round(limit.rollouts), limit.remedy]


def _check_row(needs: Needs, simulated: Simulated) -> list[str]:
    whole = simulated.slices == 1
    return [
        f"{needs.rollouts:,} rollouts",
        "a whole" if whole else f"1 of {simulated.slices:,} parts",
        f"{simulated.per_second:,.0f}",
        f"{needs.turns_per_s:,.0f}",
        f"{simulated.proxy_busy:.0%}",
        f"{simulated.redis_busy:.0%}",
        f"{simulated.added_p50_ms:.1f} ms",
        f"{simulated.added_p99_ms:.1f} ms",
    ]


def _round(value: float) -> str:
    """Two significant digits: more would claim a precision that an extrapolation does not have."""
    if value == float("inf"):
        return "never"
    return f"{float(f'{value:.1e}'):,.0f}"


def put_into(page: str, part: str, text: str) -> str:
    """A page with a part replaced.

    Raises:
        ValueError: the page lacks the marks of the part.
    """
    begin, end = f"<!-- {part}: made by `python benchmarks/simulate.py` -->", f"<!-- end of {part} -->"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the page has no lines {begin} and {end}: write them where the table belongs")
    return f"{before}{begin}\n{text}\n{end}{after}"


def write_page(part: str, text: str) -> None:
    """Replace a part of docs/scale.md."""
    PAGE.write_text(put_into(PAGE.read_text(), part, text))
