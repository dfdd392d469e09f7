"""The page of an export shows what is in its samples; what is no whole export is refused."""

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chat_tokenizer import ChatTokenizer
from tests.support.tiny_model import TinyModel
from tests.support.trees import child, root
from tokenproxy.record.turn import PromptImage, Turn
from tokenproxy.samples.samples import Sample, Selection, samples_of
from tokenproxy.samples.tree import path_of
from tokenproxy.viewer.drift import Basis, drift_lane
from tokenproxy.viewer.exported import NotAnExport, read_export
from tokenproxy.viewer.recording import PageData, add_recording
from tokenproxy.viewer.tokens import TRAINED


def _turns(**fields: Any) -> list[Turn]:
    first = root("1" * 32, [1, 2, 3, 4], [5, 6], request_class="auxiliary", **fields)
    return [first, child("2" * 32, first, [7], [8, 9], request_class="main")]


def _export(
    folder: Path, wanted: frozenset[str] = frozenset(), recorded: list[Turn] | None = None, **fields: Any
) -> tuple[Path, Sample]:
    """An export of one sample, some of whose fields are others, and the sample."""
    [sample] = samples_of(recorded or _turns(), {}, selection=Selection(classes=wanted)).samples
    file = folder / "samples.jsonl"
    file.write_text(json.dumps(msgspec.to_builtins(sample) | fields) + "\n")
    return file, sample


@pytest.mark.parametrize("wanted", [frozenset(), frozenset({"main"})])
def test_messages_and_loss_mask_are_those_of_the_samples(tmp_path: Path, wanted: frozenset[str]) -> None:
    file, sample = _export(tmp_path, wanted)
    page = PageData()
    [recording] = read_export(file)
    said = [(turn.messages, turn.message) for turn in recording.turns]
    assert said == [(turn.messages, turn.message) for turn in _turns()]
    add_recording(page, recording, None, "")
    body = base64.b64decode(next(iter(page.tokens.values())))
    header = json.loads(body[4 : 4 + int.from_bytes(body[:4], "little")])
    flags = body[-header["count"] :]
    mask = [0] * len(sample.prompt_ids) + sample.loss_mask
    assert [int(bool(flag & TRAINED)) for flag in flags] == mask
    assert sum(mask) == (2 if wanted else 4)


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
        ({"loss_mask": [0, 0, 0, 0, 0]}, "loss_mask"),
        ({"loss_mask": []}, "loss_mask"),
    ],
)
def test_a_damaged_sample_is_refused_by_number(tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    file, _ = _export(tmp_path, **fields)
    with pytest.raises(NotAnExport, match=f"sample 1: .*{reason}"):
        read_export(file)


@pytest.mark.parametrize("content", [b"not JSON\n", b'{"prompt": 1}\n', b"\xff\xfe\n"])
def test_what_is_no_export_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "other.jsonl"
    file.write_bytes(content)
    with pytest.raises(NotAnExport, match=r"other\.jsonl, line 1.*--layout plain"):
        read_export(file)


def test_a_prompt_with_images_is_not_compared_with_the_template(
    tmp_path: Path, tiny_model: TinyModel
) -> None:
    images = (PromptImage(1, 2, "0" * 32, "image/png", b"..."),)
    file, _ = _export(tmp_path, recorded=_turns(images=images))
    [recording] = read_export(file)
    assert [[each.offset for each in turn.images] for turn in recording.turns] == [[1], []]
    path = path_of(recording.turns[-1], {turn.id: turn for turn in recording.turns})
    lane = drift_lane(recording.turns, path, Basis.TEMPLATE, ChatTokenizer.load(tiny_model.folder))
    assert "images" in lane.reason and lane.hunks == []
