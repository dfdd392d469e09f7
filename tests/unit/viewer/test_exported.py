"""The page of an export shows what is in its samples."""

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from proxy.history.prompt_image import PromptImage
from proxy.history.turn import Turn
from proxy.samples.samples import Sample, samples_of
from proxy.samples.tree import path_of
from proxy.viewer.drift import Basis, drift_lane
from proxy.viewer.exported import NotAnExport, read_export
from proxy.viewer.recording import PageData, Recording, add_recording
from proxy.viewer.tokens import TRAINED
from tests.support.tiny_model import TinyModel
from tests.support.trees import child, root
from tokenization import ChatTokenizer

_USER, _ANSWER = b'[{"role": "user", "content": "a"}]', b'{"role": "assistant", "content": "b"}'


def _turns(**fields: Any) -> list[Turn]:
    usual = {"messages": _USER, "message": _ANSWER}
    first = root("1" * 32, [1, 2, 3, 4], [5, 6], **{**usual, "request_class": "auxiliary", **fields})
    return [first, child("2" * 32, first, [7], [8, 9], **usual, request_class="main")]


def _export(
    folder: Path, turns: list[Turn], wanted: frozenset[str] = frozenset()
) -> tuple[Recording, Sample]:
    """What is read from an export of one sample, and the sample."""
    [sample] = samples_of(turns, {}, wanted=wanted).samples
    file = folder / "samples.jsonl"
    file.write_bytes(msgspec.json.encode(sample) + b"\n")
    [recording] = read_export(file)
    return recording, sample


@pytest.mark.parametrize("wanted", [frozenset(), frozenset({"main"})])
def test_the_loss_mask_is_that_of_the_samples(tmp_path: Path, wanted: frozenset[str]) -> None:
    recording, sample = _export(tmp_path, _turns(), wanted)
    page = PageData()
    add_recording(page, recording, None, "")
    body = base64.b64decode(next(iter(page.tokens.values())))
    header = json.loads(body[4 : 4 + int.from_bytes(body[:4], "little")])
    flags = body[-header["count"] :]
    mask = [0] * len(sample.prompt_ids) + sample.loss_mask
    assert [int(bool(flag & TRAINED)) for flag in flags] == mask
    assert sum(mask) == (2 if wanted else 4)


@pytest.mark.parametrize("mask", [[0, 0, 0, 0, 0], [1, 1, 0, 1], []])
def test_another_loss_mask_than_that_of_its_turns_is_refused(tmp_path: Path, mask: list[int]) -> None:
    _, sample = _export(tmp_path, _turns())
    assert sample.loss_mask == [1, 1, 0, 1, 1]
    file = tmp_path / "changed.jsonl"
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(sample, loss_mask=mask)) + b"\n")
    with pytest.raises(NotAnExport, match="sample 1: `loss_mask`"):
        read_export(file)


def test_a_prompt_with_images_is_not_compared_with_the_template(
    tmp_path: Path, viewer_model: TinyModel
) -> None:
    images = (PromptImage(1, 2, "0" * 32, "image/png", b"..."),)
    recording, _ = _export(tmp_path, _turns(images=images))
    assert [[each.offset for each in turn.images] for turn in recording.turns] == [[1], []]
    by_id = {turn.id: turn for turn in recording.turns}
    path = path_of(recording.turns[-1], by_id)
    lane = drift_lane(recording.turns, path, Basis.TEMPLATE, ChatTokenizer.load(viewer_model.folder))
    assert "images" in lane.reason
    assert lane.hunks == []
