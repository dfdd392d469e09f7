"""Sessions of a damaged store or export: what can be read is shown, and nothing is made up."""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from proxy.cli import main
from proxy.history.store import Session
from proxy.history.turn import Turn
from proxy.samples.samples import samples_of
from proxy.viewer.exported import NotAnExport, read_export
from proxy.viewer.tree import session_tree
from tests.support.tiny_model import TinyModel
from tests.support.trees import child, root
from tokenization import ChatTokenizer

_QUESTION = b'[{"role": "user", "content": "a"}]'
_ANSWER = b'{"role": "assistant", "content": "b"}'
_CONTINUES = json.dumps([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]).encode()
_DAMAGED = [b"broken", b'["\xff"]', b"[" * 5000 + b"]" * 5000]


@pytest.fixture(scope="module")
def tokenizer(viewer_model: TinyModel) -> ChatTokenizer:
    return ChatTokenizer.load(viewer_model.folder)


def _turn(**fields: Any) -> Turn:
    return root("a", [1, 2], [3], **{"messages": _QUESTION, "message": _ANSWER, **fields})


def _read(turns: list[Turn], metadata: bytes = b"{}") -> dict[str, Any]:
    """The session as the page reads it."""
    session = Session(id="s", created=1.0, used=2.0, metadata=metadata)
    body = msgspec.json.encode(session_tree(session, turns, {}, -math.inf))
    read: dict[str, Any] = json.loads(body.decode())
    return read


@pytest.mark.parametrize("damaged", _DAMAGED)
def test_damaged_metadata_do_not_hide_a_session(damaged: bytes) -> None:
    assert _read([_turn()], damaged)["session"]["metadata"] == {}


@pytest.mark.parametrize("damaged", _DAMAGED)
@pytest.mark.parametrize("field", ["messages", "message"])
def test_other_turns_are_shown_next_to_damaged_json(field: str, damaged: bytes) -> None:
    sound = _turn()
    read = _read([sound, child("b", sound, [4], [5], messages=_QUESTION, message=damaged)])
    assert read["turns"][0]["message"]["content"] == "b"
    assert read["turns"][1]["message"] == {}
    assert _read([_turn(**{field: damaged})])["turns"][0][field] == ([] if field == "messages" else {})


def _exported(folder: Path, **fields: Any) -> Path:
    """An export with one sample, some of whose fields are others."""
    turn = root("1" * 32, [1, 2], [3, 4], messages=_QUESTION, message=_ANSWER)
    [sample] = samples_of([turn], {}).samples
    file = folder / "export.jsonl"
    file.write_text(json.dumps(msgspec.to_builtins(sample) | fields) + "\n")
    return file


def _spans(*places: tuple[int, int]) -> list[dict[str, Any]]:
    usual = {"trained": True, "source": "rendered", "weight_versions": []}
    return [
        {**usual, "id": f"{index:032}", "start": start, "end": end}
        for index, (start, end) in enumerate(places)
    ]


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"turns": []}, "no turns"),
        ({"turns": _spans((-1, 2))}, "spans"),
        ({"turns": _spans((1, 2), (0, 1))}, "spans"),
        ({"logprobs": []}, "logprobs"),
    ],
)
def test_a_damaged_sample_is_refused_by_number(tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    assert len(read_export(_exported(tmp_path))) == 1
    with pytest.raises(NotAnExport, match=f"sample 1: .*{reason}"):
        read_export(_exported(tmp_path, **fields))


def test_the_page_does_not_replace_the_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = _exported(tmp_path)
    before = file.read_bytes()
    assert main(["view", str(file), "-o", str(tmp_path / "." / file.name)]) == 2
    assert "pass another -o FILE" in capsys.readouterr().err
    assert file.read_bytes() == before
