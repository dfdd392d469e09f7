"""The tables of `tokenproxy top`, from one snapshot and the one before it."""

import time
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tokenproxy.top.snapshot import Snapshot, quantile

_STATES = {
    "ready": "green",
    "starting": "yellow",
    "draining": "yellow",
    "different": "red",
    "stale": "red",
    "ejected": "red",
    "down": "red",
}
_MOST_REASONS = 8


def render(url: str, now: Snapshot, before: Snapshot | None, problem: str = "") -> RenderableType:
    """The whole view.

    Args:
        before: an earlier snapshot, for rates; None shows totals since the proxy's start instead.
        problem: the reason why there is no newer snapshot; empty if this is the newest.
    """
    title = Text.assemble(("tokenproxy top", "bold"), f"  {url}")
    parts: list[RenderableType] = [title]
    if problem:
        parts += [Text(problem, "red"), Text("the values below are old; trying again", "red")]
    parts += [_speeds(now, before), _replicas(now), _prompts(now), _sessions(now)]
    return Group(*parts)


def render_problem(url: str, problem: str) -> RenderableType:
    """The view before the proxy responded for the first time."""
    return Group(Text.assemble(("tokenproxy top", "bold"), f"  {url}"), Text(problem, "red"))


def _speeds(now: Snapshot, before: Snapshot | None) -> Table:
    table = _table("requests", "in flight", "queued", _per("requests", before), _per("sampled ids", before))
    for name in ("first byte", "added p50", "added p99", "loop lag p99", "store p99"):
        table.add_column(name, justify="right")
    table.add_row(
        f"{now.value('requests_total'):,.0f}",
        f"{now.value('requests_in_flight'):.0f}",
        f"{now.value('requests_queued'):.0f}",
        _speed(now, before, "requests_total"),
        _speed(now, before, "sampled_ids_total"),
        _seconds(quantile(now, before, "time_to_first_byte_seconds", 0.5)),
        _seconds(quantile(now, before, "added_seconds", 0.5)),
        _seconds(quantile(now, before, "added_seconds", 0.99)),
        _seconds(quantile(now, before, "event_loop_lag_seconds", 0.99)),
        _seconds(quantile(now, before, "store_seconds", 0.99)),
    )
    return table


def _replicas(now: Snapshot) -> Table:
    table = _table("replica", "state", "model", "exact prompts", "append", "in flight", "ejections", left=5)
    for engine in now.engines:
        name = str(engine.get("engine", ""))
        state = now.state_of(name) or ("ready" if engine.get("ready") else "down")
        table.add_row(
            Text(name),  # texts from outside are never parsed as markup
            Text(state, _STATES.get(state, "")),
            Text(str(engine.get("model") or "-")),
            Text(str(engine.get("token_in") or "-")),
            Text(str(engine.get("problem") or engine.get("append") or "-")),
            f"{now.value('replica_requests_in_flight', replica=name):.0f}",
            f"{now.value('replica_ejections_total', replica=name):.0f}",
        )
    return table


def _prompts(now: Snapshot) -> Table:
    """The sources of prompt ids, and the reasons why prompts were rendered."""
    ids = now.by("prompt_ids_total", "kind")
    total = sum(ids.values())
    shares = [f"{kind} {count:,.0f} ({count / total:.0%})" for kind, count in sorted(ids.items()) if count]
    reasons = sorted(now.by("prompts_total", "reason").items(), key=lambda pair: -pair[1])
    sources = [f"{name} {count:,.0f}" for name, count in sorted(now.by("prompts_total", "source").items())]
    table = _table("prompts", "", left=2)
    table.add_row("by source", ", ".join(sources) or "none yet")
    table.add_row("ids", ", ".join(shares) or "none yet")
    counted = [f"{reason} {count:,.0f}" for reason, count in reasons if reason != "none" and count]
    table.add_row("reasons", ", ".join(counted[:_MOST_REASONS]) or "none")
    events = [
        f"{name.replace('_', ' ')} {now.value(f'{name}_total'):,.0f}"
        for name in ("store_errors", "client_disconnects", "retries")
    ]
    table.add_row("events", ", ".join(events))
    return table


def _sessions(now: Snapshot) -> RenderableType:
    if now.sessions_problem:
        return Text(now.sessions_problem, "yellow")
    table = _table("session", "turns", "bytes", "last used", "", left=1)
    for session in now.sessions:
        table.add_row(
            Text(str(session.get("id", ""))),
            f"{session.get('turn_count', 0):,}",
            f"{session.get('bytes', 0):,}",
            _ago(session),
            "ambiguous" if session.get("ambiguous") else "",
        )
    return table


def _ago(session: dict[str, Any]) -> str:
    used = session.get("used")
    if not isinstance(used, int | float):
        return "-"
    seconds = max(0.0, time.time() - used)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _table(*columns: str, left: int = 0) -> Table:
    """A table whose first columns hold text, and the others numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index < left else "right", header_style="bold")
    return table


def _per(name: str, before: Snapshot | None) -> str:
    return f"{name}/s" if before is not None else f"{name} so far"


def _speed(now: Snapshot, before: Snapshot | None, name: str) -> str:
    if before is None:
        return f"{now.value(name):,.0f}"
    seconds = now.at - before.at
    # a proxy that was started again counts from 0
    return f"{max(0.0, now.value(name) - before.value(name)) / seconds:,.1f}" if seconds > 0 else "-"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.1f} s"
