"""Log lines of a real `tokenproxy serve`; `tests/unit/monitoring` has the formatters and filters."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.serve_process import ServeProcess
from tests.support.talk import CHAT

_HI = {"messages": [{"role": "user", "content": "Hi"}], "model": "tiny"}


def test_json_lines_and_the_access_log(
    mortal: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers, which loads the tokenizer, warns on stderr with a handler of its own
    monkeypatch.delenv("TRANSFORMERS_NO_ADVISORY_WARNINGS", raising=False)
    store = f"sqlite://{tmp_path}/turns.db"
    flags = ("--log-format", "json", "--log-level", "debug", "--resume", "off", "--store", store)
    with (
        ServeProcess([mortal.url], tmp_path / "log", *flags) as served,
        httpx.Client(base_url=served.url, trust_env=False, timeout=20) as client,
    ):
        headers = {"x-request-id": "mine", "x-session-id": "s"}
        client.post(f"{CHAT}?key=secret", json=_HI, headers=headers)
        mortal.replies.append(Reply(break_at=1, how="reset"))
        client.post(CHAT, json={**_HI, "stream": True}, headers={"x-request-id": "broken"})
        client.get("/a%0Ab")
        served.wait_ready()
        served.signal()
        served.wait()
    lines: list[dict[str, Any]] = [json.loads(line) for line in served.text.splitlines()]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"]) for line in lines)
    assert {"tokenproxy", "tokenproxy.access", "uvicorn.error", "stderr"} <= {
        line["logger"] for line in lines
    }
    # a line is written after the response was sent
    access = {line["request_id"]: line for line in lines if line["logger"] == "tokenproxy.access"}
    assert access["mine"]["path"] == access["broken"]["path"] == CHAT
    assert "/a%0Ab" in [line["path"] for line in access.values()]
    first = access["mine"]
    expected = {"method": "POST", "status": 200, "client": "127.0.0.1", "source": "rendered", "session": "s"}
    assert {name: first[name] for name in expected} == expected
    assert 0 < first["added_ms"] <= first["duration_ms"]
    warnings = [line for line in lines if line["level"] == "warning" and line.get("request_id") == "broken"]
    assert "ends with an error" in warnings[0]["message"]
    assert "secret" not in json.dumps(lines)
