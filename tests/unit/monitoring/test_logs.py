"""Formatters and filters of log lines; `tests/contract/monitoring` has the lines of a served proxy."""

import json
import logging
import sys
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from tokenproxy.monitoring.exchange import Exchange
from tokenproxy.monitoring.logs import JsonFormatter, RelayHandler, RepeatLimit, RequestFields, TextFormatter
from tokenproxy.monitoring.metrics import Metrics


def _record() -> logging.LogRecord:
    return logging.LogRecord("tokenproxy", logging.WARNING, "a.py", 7, "no %s", ("x",), None)


async def _no_client(*messages: Any) -> Any:
    raise AssertionError


def _in_a_request(work: Callable[[], object]) -> None:
    def run() -> None:
        Exchange({"headers": [(b"x-request-id", b"mine")]}, _no_client, _no_client, Metrics())
        work()

    copy_context().run(run)


class _Kept(logging.Handler):
    """Keeps what it is handed."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def test_json_of_an_exception() -> None:
    record = _record()
    try:
        raise ValueError('with "quotes"\nand lines')
    except ValueError:
        record.exc_info = sys.exc_info()
    text = JsonFormatter().format(record)
    line = json.loads(text)
    assert (line["message"], line["level"], line["logger"]) == ("no x", "warning", "tokenproxy")
    assert 'ValueError: with "quotes"\nand lines' in line["exception"]
    assert "\n" not in text and "request_id" not in line


def test_lines_of_a_request_have_its_id_and_fields() -> None:
    record = _record()
    RequestFields().filter(record)
    assert TextFormatter().format(record).endswith(" WARNING tokenproxy: no x")
    record.fields = {"status": 200}
    _in_a_request(lambda: RequestFields().filter(record))
    assert TextFormatter().format(record).endswith("tokenproxy: no x status=200 [request mine]")
    line = json.loads(JsonFormatter().format(record))
    assert (line["request_id"], line["status"]) == ("mine", 200)


def test_inside_vllm_the_id_is_in_the_message() -> None:
    target = _Kept()
    _in_a_request(lambda: RelayHandler([target]).handle(_record()))
    assert target.messages == ["no x [request mine]"]


def test_repeated_errors_are_left_out_and_counted() -> None:
    """Two lines of a kind are written in 10 s."""
    now, later = 0.0, list[tuple[float, Callable[[], None]]]()
    logger, handler = logging.getLogger("tokenproxy.limited"), _Kept()
    handler.addFilter(RepeatLimit(2, 10.0, lambda: now, lambda *scheduled: later.append(scheduled)))
    logger.addHandler(handler)
    try:
        for number in range(10):
            now += 0.5
            logger.error("broken: %d", number)
            logger.info("fine")  # never left out
        logger.error("another")
        assert [each for each in handler.messages if each != "fine"] == ["broken: 0", "broken: 1", "another"]
        [(seconds, report)] = later
        assert seconds == 9.0  # the third line came a second after the first, with which the window began
        report()
        assert handler.messages[-1] == "8 lines like this were left out in 10 s, the last one: broken: 9"
        now += 10.0
        logger.error("broken: %d", 10)
        assert handler.messages[-1] == "broken: 10"
    finally:
        logger.removeHandler(handler)
