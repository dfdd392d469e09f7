"""Log lines, of a real `tokenproxy serve` and of the formatters and filters alone."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.metrics import Metrics
from proxy.monitoring.exchange import Exchange, run_exchange
from proxy.monitoring.logs import JsonFormatter, RelayHandler, RepeatLimit, RequestFields, TextFormatter
from tests.support.fake_vllm import Canned, FakeVllm, Reply
from tests.support.talk import CHAT

_HI = {"messages": [{"role": "user", "content": "Hi"}], "model": "tiny"}


@dataclass
class Served:
    """A proxy as a process of its own."""

    client: httpx.Client
    lines: list[str] = field(default_factory=list)
    """What it has logged, complete when it has ended."""


@contextmanager
def _serve(fake: FakeVllm, folder: Path, *flags: str) -> Iterator[Served]:
    fake.canned["/v1/models"] = Canned(b'{"data": []}')  # no model, no tokenizer to load
    log = folder / "log"
    command = [sys.executable, "-m", "proxy.cli", "serve", "--upstream", fake.url, "--port", "0", *flags]
    with log.open("wb") as file, subprocess.Popen(command, stderr=file, env=dict(os.environ)) as process:
        try:
            deadline = time.monotonic() + 60
            while not (found := re.search(r"running on (http://[\d.:]+)", log.read_text())):
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            with httpx.Client(base_url=found[1], trust_env=False, timeout=20) as client:
                served = Served(client)
                yield served
            process.send_signal(signal.SIGTERM)
            process.wait(30)
        finally:
            process.kill()
    served.lines = log.read_text().splitlines()


def test_json_lines_and_the_access_log(mortal: FakeVllm, tmp_path: Path) -> None:
    store = f"sqlite://{tmp_path}/turns.db"
    with _serve(mortal, tmp_path, "--log-format", "json", "--access-log", "--store", store) as served:
        headers = {"x-request-id": "mine", "x-session-id": "s"}
        served.client.post(f"{CHAT}?key=secret", json=_HI, headers=headers)
        mortal.replies.append(Reply(break_at=1, how="reset"))
        served.client.post(CHAT, json={**_HI, "stream": True}, headers={"x-request-id": "broken"})
        served.client.get("/health")
        served.client.get("/a%0Ab")
    lines: list[dict[str, Any]] = [json.loads(line) for line in served.lines]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"]) for line in lines)
    assert {"tokenproxy", "tokenproxy.access", "uvicorn.error"} <= {line["logger"] for line in lines}
    access = [line for line in lines if line["logger"] == "tokenproxy.access"]
    assert [(line["request_id"], line["path"]) for line in access[:2]] == [("mine", CHAT), ("broken", CHAT)]
    assert access[2]["path"] == "/a%0Ab"
    first = access[0]
    expected = {"method": "POST", "status": 200, "client": "127.0.0.1", "source": "rendered", "session": "s"}
    assert {name: first[name] for name in expected} == expected
    assert 0 < first["added_ms"] <= first["duration_ms"]
    warnings = [line for line in lines if line["level"] == "warning" and line.get("request_id") == "broken"]
    assert "ends with an error" in warnings[0]["message"]
    assert "secret" not in json.dumps(lines)


def test_text_lines(mortal: FakeVllm, tmp_path: Path) -> None:
    store = f"sqlite://{tmp_path}/turns.db"
    with _serve(mortal, tmp_path, "--access-log", "--store", store) as served:
        served.client.post(CHAT, json=_HI, headers={"x-request-id": "mine"})
    [line] = [line for line in served.lines if "tokenproxy.access" in line]
    start = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO tokenproxy\.access: "
    assert re.match(rf"{start}POST {CHAT} 200 .*status=200 .*source=rendered .*\[request mine\]$", line)


def test_no_access_log_unless_it_is_set(mortal: FakeVllm, tmp_path: Path) -> None:
    with _serve(mortal, tmp_path, "--store", f"sqlite://{tmp_path}/turns.db") as served:
        served.client.post(CHAT, json=_HI)
    assert not [line for line in served.lines if CHAT in line]


def _record(message: str = "no %s", *arguments: object, **more: Any) -> logging.LogRecord:
    record = logging.LogRecord("tokenproxy", logging.WARNING, "a.py", 7, message, arguments or ("x",), None)
    record.__dict__.update(more)
    return record


def test_json_of_an_exception() -> None:
    try:
        raise ValueError('with "quotes"\nand lines')
    except ValueError:
        record = _record()
        record.exc_info = sys.exc_info()
    text = JsonFormatter().format(record)
    assert "\n" not in text
    line = json.loads(text)
    assert (line["message"], line["level"], line["logger"]) == ("no x", "warning", "tokenproxy")
    assert 'ValueError: with "quotes"\nand lines' in line["exception"]
    assert "request_id" not in line


def _in_a_request(work: Callable[[], object]) -> None:
    def run() -> None:
        run_exchange(Exchange("mine", Metrics()))
        work()

    copy_context().run(run)


def test_lines_of_a_request_have_its_id() -> None:
    record = _record()
    RequestFields().filter(record)
    assert TextFormatter().format(record).endswith("tokenproxy: no x")
    _in_a_request(lambda: RequestFields().filter(record))
    assert TextFormatter().format(record).endswith("tokenproxy: no x [request mine]")
    assert json.loads(JsonFormatter().format(record))["request_id"] == "mine"


class _Kept(logging.Handler):
    """Keeps what it is handed."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def limited() -> Iterator[tuple[logging.Logger, _Kept]]:
    """A logger whose handler lets two lines of a kind through in 0.3 s."""
    logger, handler = logging.getLogger("tokenproxy.limited"), _Kept()
    handler.addFilter(RepeatLimit(repeats=2, window_s=0.3))
    logger.addHandler(handler)
    yield logger, handler
    logger.removeHandler(handler)


def test_repeated_errors_are_left_out_and_counted(limited: tuple[logging.Logger, _Kept]) -> None:
    logger, handler = limited
    for number in range(10):
        logger.error("broken: %d", number)
        logger.info("fine")  # never left out
    logger.error("another")
    assert handler.messages.count("another") == 1
    assert [each for each in handler.messages if "broken" in each] == ["broken: 0", "broken: 1"]
    deadline = time.monotonic() + 20
    summary = "8 lines like this were left out in 0.3 s, the last one: broken: 9"
    while handler.messages[-1] != summary:
        assert time.monotonic() < deadline, handler.messages
        time.sleep(0.02)


def test_lines_that_repeat_slowly_are_all_written(limited: tuple[logging.Logger, _Kept]) -> None:
    logger, handler = limited
    for number in range(4):
        logger.warning("slow: %d", number)
        time.sleep(0.31)
    assert handler.messages == [f"slow: {number}" for number in range(4)]


def test_inside_vllm_the_id_is_in_the_message() -> None:
    target = _Kept()
    quiet = _Kept()
    quiet.setLevel(logging.ERROR)
    relay = RelayHandler([target, quiet])
    _in_a_request(lambda: relay.handle(_record()))
    assert (target.messages, quiet.messages) == (["no x [request mine]"], [])
