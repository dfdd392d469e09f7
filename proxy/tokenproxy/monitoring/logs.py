"""Formats log lines as text or JSON, with the id of their request, and leaves out repeated ones.

It needs only the standard library: structlog would replace the two formatters and two filters below, but is
one more dependency, and inside vLLM most loggers are not configured by it.
"""

import io
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TextIO, cast

import msgspec

from tokenproxy.monitoring.exchange import running_exchange

REPEATS = 5
"""Lines of one kind that are written in a window; further ones are counted."""
WINDOW_S = 10.0


def configure_logs(level: str, form: Literal["text", "json"]) -> None:
    """Write the log of this process to stderr. Loggers that have handlers already keep them.

    `debug` is for the proxy's own loggers, as those of libraries then write much about little.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    handler.addFilter(RequestFields())
    handler.addFilter(RepeatLimit())
    logging.basicConfig(level="INFO" if level == "debug" else level.upper(), handlers=[handler])
    logging.getLogger("tokenproxy").setLevel(level.upper())
    if form == "json":
        logging.captureWarnings(True)
        logging.raiseExceptions = False  # else a handler that fails reports it on stderr, which is logged
        sys.stderr = cast(TextIO, _LoggedLines())


class _LoggedLines(io.TextIOBase):
    """Stands for stderr, and logs each line: of libraries that write there with handlers of their own."""

    _rest = ""

    def write(self, text: str) -> int:
        """Log the lines that are complete."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in filter(str.strip, lines):
            logging.getLogger("stderr").warning("%s", line, extra={"left_out": 0})  # a traceback is whole
        return len(text)


class RequestFields(logging.Filter):
    """Gives each record the id of the running request, and of its trace."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Always True."""
        exchange = running_exchange()
        if exchange is not None:
            record.request_id = exchange.id
            record.trace_id = exchange.span.trace_id
        return True


def _run_later(seconds: float, work: Callable[[], None]) -> None:
    """Run work on a thread after a time. The end of the process does not wait for it."""
    timer = threading.Timer(seconds, work)
    timer.daemon = True
    timer.start()


class RepeatLimit(logging.Filter):
    """Lets REPEATS warnings or errors of one line of code through in WINDOW_S seconds, and counts the others.

    The number of lines left out is logged at the end of the window, even if no such line follows.
    """

    def __init__(
        self,
        repeats: int = REPEATS,
        window_s: float = WINDOW_S,
        clock: Callable[[], float] = time.monotonic,
        run_later: Callable[[float, Callable[[], None]], None] = _run_later,
    ) -> None:
        super().__init__()
        self._repeats = repeats
        self._window_s = window_s
        self._clock = clock
        self._run_later = run_later
        self._windows: dict[tuple[str, str, int], _Window] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is written."""
        if record.levelno < logging.WARNING or hasattr(record, "left_out"):
            return True
        key, now = (record.name, record.pathname, record.lineno), self._clock()
        with self._lock:
            window = self._windows.get(key)
            if window is None or now >= window.end:
                window = self._windows[key] = _Window(now + self._window_s)
            window.count += 1
            if window.count <= self._repeats:
                return True
            window.last = record
            if window.count == self._repeats + 1:
                self._run_later(max(0.0, window.end - now), partial(self._report, window))
            return False

    def _report(self, window: "_Window") -> None:
        """Write how many lines a window left out, with the last of them."""
        with self._lock:
            left_out, last = window.count - self._repeats, window.last
            window.last = None
        if last is None:
            return
        record = logging.LogRecord(
            last.name,
            last.levelno,
            last.pathname,
            last.lineno,
            "%d lines like this were left out in %g s, the last one: %s",
            (left_out, self._window_s, last.getMessage()),
            None,
            last.funcName,
        )
        record.left_out = left_out
        logging.getLogger(last.name).handle(record)


class _Window:
    """The lines of one kind in one window of time."""

    __slots__ = ("count", "end", "last")

    def __init__(self, end: float) -> None:
        self.end = end
        self.count = 0
        self.last: logging.LogRecord | None = None
        """The last line that was left out."""


class TextFormatter(logging.Formatter):
    """`2026-01-31 12:00:00,123 INFO tokenproxy: message name=value [request ID]`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Format the record without its traceback."""
        line = super().formatMessage(record)
        fields: dict[str, Any] = getattr(record, "fields", {})
        parts = [line, *(f"{name}={value}" for name, value in fields.items())]
        if identity := getattr(record, "request_id", ""):
            parts.append(f"[request {identity}]")
        return " ".join(parts)


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON: time, level, logger, message, and the record's extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in ("request_id", "trace_id", "left_out"):
            if value := getattr(record, name, None):
                line[name] = value
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


class RelayHandler(logging.Handler):
    """Hands records to the handlers of another logger, after the filters of this one.

    Used inside vLLM. vLLM's formatter does not print request ids, so they become part of the message.
    """

    def __init__(self, targets: Sequence[logging.Handler]) -> None:
        super().__init__()
        self._targets = list(targets)
        self.addFilter(RequestFields())
        self.addFilter(RepeatLimit())

    def emit(self, record: logging.LogRecord) -> None:
        """Hand on a record."""
        if identity := getattr(record, "request_id", ""):
            record = logging.makeLogRecord(record.__dict__)
            record.msg, record.args = f"{record.getMessage()} [request {identity}]", None
        for target in self._targets:
            if record.levelno >= target.level:
                target.handle(record)
