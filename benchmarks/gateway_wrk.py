"""Runs wrk with the requests of a load, and reads what it measured."""

import json
import math
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gateway_loads import CLIENT_HEADERS, Load
from benchmarks.load import BadResponse

CONNECTIONS = 32
_SCRIPT = Path(__file__).with_name("gateway.lua")
_LEFT_OUT = ("connection", "host")
"""Headers that wrk writes by itself."""
_PATIENCE_S = 60
"""For a response; the run itself ends in time."""
_IN_FLIGHT = 2 * CONNECTIONS
"""Requests at the end of a run that may be without response."""


class NoResponse(BadResponse):
    """No response came before the run ended."""


@dataclass(frozen=True, slots=True)
class WrkResult:
    """What one run measured."""

    requests: int
    seconds: float
    p50_ms: float
    p99_ms: float
    failed: int
    """Responses with a status from 400 on."""
    broken: int
    """Connections that broke, and responses that did not come in time."""
    position: int
    """Of the request after the last one that was sent."""

    @property
    def per_second(self) -> float:
        """Responses per second."""
        return self.requests / self.seconds

    def resume(self, first: int) -> int:
        """The position of the next run after one that began at `first`.

        The last requests are sent again: without their responses, conversations would lack a turn.
        """
        return max(first, self.position - _IN_FLIGHT)


def find_wrk() -> str | None:
    """The program's path; None if it is not installed."""
    return shutil.which("wrk")


@dataclass(frozen=True, slots=True)
class Pace:
    """How to load a gateway."""

    seconds: int
    connections: int = CONNECTIONS

    @classmethod
    def of(cls, seconds: int, request_s: float) -> "Pace":
        """The pace for a gateway that takes `request_s` for a request alone.

        A slow one is loaded longer, until each connection can have two responses, but at most five times as
        long; if that does not suffice, on fewer connections.
        """
        longest = 5 * seconds
        connections = max(1, min(CONNECTIONS, int(longest / 2 / request_s)))
        return cls(max(seconds, min(longest, math.ceil(2 * connections * request_s))), connections)

    def longer(self) -> "Pace":
        """For another try after a run without a response: the machine was busy."""
        return Pace(5 * self.seconds, self.connections)


def run_wrk(url: str, load: Load, folder: Path, pace: Pace, first: int, prefix: str = "") -> WrkResult:
    """Send a load from one thread.

    Args:
        folder: for the files that the script reads.
        first: position of the first request; see `gateway.lua`.
        prefix: of the path.

    Raises:
        NoResponse: there was no response.
        BadResponse: wrk ended with an error, or responses were errors.
    """
    body, table = folder / "body", folder / "load.lua"
    body.write_bytes(b"\x03".join((load.opening, load.step, load.closing)))
    fields = {
        "path": prefix + load.path,
        "body": str(body),
        "conversations": load.conversations,
        "sessions": load.sessions,
        "first": first,
    }
    headers = {name: value for name, value in CLIENT_HEADERS.items() if name not in _LEFT_OUT}
    table.write_text(f"return {_lua({**fields, 'headers': headers})}\n")
    command = ["wrk", "--threads", "1", "--connections", str(pace.connections)]
    command += ["--duration", f"{pace.seconds}s"]
    command += ["--timeout", f"{_PATIENCE_S}s", "--script", str(_SCRIPT), url, "--", str(table)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=pace.seconds + _PATIENCE_S)
    lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
    if run.returncode or not lines:
        raise BadResponse(f"wrk returned {run.returncode}: {(run.stderr or run.stdout)[-500:]}")
    result = WrkResult(**json.loads(lines[-1]))
    if result.failed:
        raise BadResponse(f"{result.failed} of {result.requests} responses were errors")
    if not result.requests:
        raise NoResponse(f"no response in {pace.seconds} s")
    return result


def _lua(value: Any) -> str:
    """A value as Lua source. Strings are plain ASCII."""
    if isinstance(value, dict):
        return "{" + ", ".join(f'["{name}"] = {_lua(item)}' for name, item in value.items()) + "}"
    return json.dumps(value)
