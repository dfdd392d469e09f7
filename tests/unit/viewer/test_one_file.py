"""`tokenproxy view`: rollouts of a store, of an export and of a running proxy as one HTML file."""

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.store_utils import opened
from tests.support.tiny_model import TinyModel
from tests.support.viewer.recordings import LIMITS, write
from tests.support.viewer.small_session import SMALL, SmallSession, small_session
from tokenproxy.cli.main import main
from tokenproxy.viewer.exported import read_export
from tokenproxy.viewer.page import bundle, single_file
from tokenproxy.viewer.recording import PageData

_KEPT = (
    *("parent", "appended", "completion", "logprobs", "prompt_tokens", "source", "reason"),
    *("weight_versions", "finish_reason", "agent"),
)
"""Fields of a turn that an export keeps."""


@pytest.fixture(scope="module")
def small(tiny_model: TinyModel) -> SmallSession:
    return small_session(tiny_model)


@pytest.fixture
async def store_url(small: SmallSession, tmp_path: Path) -> str:
    url = f"sqlite://{tmp_path / 'rollouts.db'}"
    async with opened(url, LIMITS) as store:
        await write(store, [small.recorded])
    return url


def _data(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_the_policy_allows_exactly_its_script_and_style() -> None:
    html = single_file(PageData())
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None and policy[1].startswith("default-src 'none'")
    for tag in ("style", 'script type="module"'):
        part = re.search(rf"<{tag}>(.*?)</{tag.split()[0]}>", html, re.DOTALL)
        assert part is not None
        digest = base64.b64encode(hashlib.sha256(part[1].encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy[1]


def test_the_script_is_whole() -> None:
    script = bundle()
    assert re.search(r"^(import|export)\b", script, re.MULTILINE) is None
    assert "</script" not in script.lower()


def test_no_text_of_a_recording_ends_the_data() -> None:
    text = "</script><script>alert(1)</script><!--"
    html = single_file(PageData(sessions=[{"id": text}]))
    assert text not in html
    assert _data(html)["sessions"] == [{"id": text}]


def test_sessions_of_a_store(
    store_url: str, small: SmallSession, tiny_model: TinyModel, tmp_path: Path
) -> None:
    out = tmp_path / "page.html"
    flags = ["--store", store_url, "--tokenizer", str(tiny_model.folder), "-o", str(out)]
    assert main(["view", SMALL, *flags]) == 0
    assert out.stat().st_mode & 0o777 == 0o600  # as the store, which holds the same
    data = _data(out.read_text())
    assert [row["id"] for row in data["sessions"]] == [SMALL]
    leaves = {small.aborted.id, small.special.id, small.subagent_end.id, small.after_break.id}
    assert {name.partition("/")[2] for name in data["tokens"]} == {*leaves, small.broken.id}
    assert data["drift"][f"{SMALL}/{small.broken.id}"][0]["basis"] == "before"
    assert data["folds"]["step"]["data"] == [
        {"value": "3", "rollouts": 1, "rewarded": 1, "mean": 0.75, "spread": 0.0, "read": 1, "turns": 11}
        | {"drifted": 1}
    ]
    [lane] = data["drift"][f"{SMALL}/{small.aborted.id}"]
    assert (lane["basis"], lane["reason"]) == ("template", "")


@pytest.mark.parametrize("name", ["samples.jsonl", "samples.parquet"])
def test_an_export_gives_the_turns_again(
    store_url: str, small: SmallSession, tmp_path: Path, name: str
) -> None:
    file, out = tmp_path / name, tmp_path / "page.html"
    assert main(["export", "--store", store_url, "--out", str(file)]) == 0
    [recording] = read_export(file)
    found = {turn.id: turn for turn in recording.turns}
    recorded = {turn.id: turn for turn in small.recorded.turns}
    assert set(found) == set(recorded) - {small.refused.id, small.special.id}
    for turn in found.values():
        original = recorded[turn.id]
        for field in _KEPT:
            assert getattr(turn, field) == getattr(original, field), field
        assert json.loads(turn.message) == json.loads(original.message)
        assert json.loads(turn.messages) == json.loads(original.messages)
    assert recording.rewards == {"": 0.75, small.emoji.id: 1.0, small.aborted.id: -0.5}
    assert json.loads(recording.session.metadata) == {"task": "fix-test", "step": 3, "split": "train"}
    assert main(["view", str(file), "-o", str(out)]) == 0
    data = _data(out.read_text())
    assert [row["id"] for row in data["sessions"]] == [SMALL]
    body = base64.b64decode(next(iter(data["tokens"].values())))
    header = json.loads(body[4 : 4 + int.from_bytes(body[:4], "little")])
    assert header["texts"] == {} and "--tokenizer" in header["note"]


def test_wrong_use_is_told(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    store = ["--store", store_url]
    assert main(["export", *store, "--out", "read.jsonl"]) == 0
    for arguments, code, message in (
        (["never", *store], 2, "unknown session never"),
        ([SMALL, "--store", "memory:"], 2, "memory:"),
        ([SMALL, "--store", "sqlite:nowhere.db"], 2, "no store at"),
        ([SMALL, *store, "-o", str(tmp_path)], 2, "not a regular file"),
        ([SMALL, "--url", "http://127.0.0.1:9"], 1, "no proxy responds"),
        (["a,b", "--url", "http://127.0.0.1:9"], 2, "SESSION"),
        ([SMALL, *store, "--url", "http://127.0.0.1:9"], 2, "--store has no effect"),
        ([SMALL, "--api-key", "a\nb", "--url", "http://127.0.0.1:9"], 2, "printable"),
        ([SMALL, *store, "-o", ""], 2, "-o must name a file"),
        (["read.jsonl", "-o", f"../{tmp_path.name}/read.jsonl"], 2, "read.jsonl is read"),
    ):
        assert main(["view", *arguments]) == code, arguments
        assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("*.html"))
    assert main(["view", SMALL, *store]) == 0
    assert (tmp_path / f"{SMALL}.html").exists()
