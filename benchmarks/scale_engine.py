"""The engine of `simulate.py`: the fixed answers of `gateway_engine`, each after a given time.

`python -m benchmarks.scale_engine FILE --model FOLDER` prints its port. `GET /service/SECONDS` sets the time
of an answer. A streamed answer comes in one chunk per sampled id, spread evenly over its time.
`GET /totals` returns what it did: answers, bytes read and written, CPU seconds.
"""

import time

from benchmarks.cases import http_response
from benchmarks.gateway_answers import Answer
from benchmarks.gateway_engine import Connection, Connections, Engine, run


class PacedEngine(Engine):
    """An engine that waits before it answers, and counts."""

    def __init__(self, answers: dict[str, Answer], root: str) -> None:
        super().__init__(answers, root)
        self.answers = self.read_bytes = self.written_bytes = 0
        self.service_s = 0.0

    def page(self, path: str, body: bytes) -> bytes:
        """The response to a request for anything but an answer."""
        command, _, value = path.removeprefix("/").partition("/")
        if command == "service":
            self.service_s = float(value)
            return http_response({"service_s": self.service_s})
        if command == "totals":
            totals = {"answers": self.answers, "read": self.read_bytes, "written": self.written_bytes}
            return http_response(totals | {"cpu_s": time.process_time()})
        return super().page(path, body)


class PacedConnection(Connection):
    """One connection to it."""

    def __init__(self, engine: PacedEngine) -> None:
        super().__init__(engine)
        self._paced = engine

    def _respond(self, head: bytes, body: bytes) -> None:
        if not head.startswith(b"POST /v1/chat/completions "):
            super()._respond(head, body)
            return
        engine = self._paced
        parts = engine.answer(body)
        engine.answers += 1
        engine.read_bytes += len(head) + len(body)
        engine.written_bytes += sum(map(len, parts))
        service_s = engine.service_s
        if service_s <= 0:
            self._write(parts, 0)
            return
        if len(parts) == 1:
            self._loop.call_later(service_s, self._write_timed, parts, 0, 0.0, 0.0)
        else:
            # the first chunk has only the role
            self._write_timed(parts, 0, self._loop.time(), service_s / (len(parts) - 1))

    def _write_timed(self, parts: list[bytes], number: int, begun: float, pause_s: float) -> None:
        """Write a part now, and the others at their times; late ones at once: delays do not add up."""
        if self._transport.is_closing():
            return
        self._transport.write(parts[number])
        if number + 1 < len(parts):
            at = begun + (number + 1) * pause_s
            self._loop.call_at(at, self._write_timed, parts, number + 1, begun, pause_s)


def _connections(answers: dict[str, Answer], root: str) -> Connections:
    engine = PacedEngine(answers, root)
    return lambda: PacedConnection(engine)


if __name__ == "__main__":
    run(__doc__, _connections)
