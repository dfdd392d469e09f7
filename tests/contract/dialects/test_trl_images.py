"""Images on the routes of `trl vllm-serve`: next to ids and text, and in messages."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.fake_vision import PLACEHOLDER, FakeVision, ids_of_image, picture
from tests.support.tiny_model import END, HI, TinyModel
from tests.support.utils import run_proxy

GENERATE, BATCH_CHAT = "/generate/", "/chat/"
RED, WIDE = picture("red"), picture("blue", 30)
DATA_URL = f"data:image/png;base64,{WIDE}"


@pytest.fixture(scope="module")
def engine(tiny_model: TinyModel) -> Iterator[FakeVision]:
    with FakeVision(tiny_model) as engine:
        yield engine


@pytest.fixture(scope="module")
def vision(engine: FakeVision) -> Iterator[httpx.Client]:
    with run_proxy([engine]) as client:
        yield client


def _post(client: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    response = client.post(path, json={"max_tokens": 4, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_each_prompt_has_its_images_or_none(vision: httpx.Client, engine: FakeVision) -> None:
    single = [1, PLACEHOLDER, 74]
    already = [1, *ids_of_image(RED), 74, PLACEHOLDER]
    prompts = [single, [1, 75], already, single]
    images = [[RED], None, [RED, DATA_URL], [DATA_URL]]
    answer = _post(vision, GENERATE, prompts=prompts, images=images, n=2)
    assert answer["prompt_ids"] == [
        [1, *ids_of_image(RED), 74],
        [1, 75],
        [1, *ids_of_image(RED), 74, *ids_of_image(WIDE)],
        [1, *ids_of_image(WIDE), 74],
    ]
    assert answer["completion_ids"] == [[*HI, END]] * 8
    assert [len(each) for each in answer["logprobs"]] == [len(HI) + 1] * 8
    sent = [seen.json for seen in engine.seen("/inference/v1/generate") if seen.json.get("content_parts")]
    assert [1, PLACEHOLDER, 74] in [body["token_ids"] for body in sent]
    assert {part["url"].rpartition(",")[2] for body in sent[-3:] for part in body["content_parts"]} == {
        RED,
        WIDE,
    }


def test_images_in_messages(vision: httpx.Client, engine: FakeVision) -> None:
    """TRL's client sends them as base64 in parts of type `image_pil`."""
    kinds = [
        {"type": "image_pil", "image_pil": RED},
        {"type": "image_pil", "image_pil": f"data:image/png;base64,{RED}"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{RED}"}},
    ]
    messages = [[{"role": "user", "content": [kind, {"type": "text", "text": "hi"}]}] for kind in kinds]
    answer = _post(vision, BATCH_CHAT, messages=messages)
    first, *others = answer["prompt_ids"]
    assert others == [first, first]
    image = ids_of_image(RED)
    start = first.index(image[0])
    assert first[start : start + len(image)] == image


_WRONG: dict[str, tuple[list[Any], list[Any], str]] = {
    "too many": ([[1, PLACEHOLDER]], [[RED, RED]], "images[0]"),
    "too few": ([[1], [1, PLACEHOLDER, 5, PLACEHOLDER]], [None, [RED]], "images[1]"),
    "without a placeholder in the text": (["hi"], [[RED]], "images[0]"),
    "no image": ([[1, PLACEHOLDER]], [["AAAA"]], "images[0]"),
    "from the web": ([[1, PLACEHOLDER]], [["http://127.0.0.1/x.png"]], "images[0]"),
}


@pytest.mark.parametrize(("prompts", "images", "param"), _WRONG.values(), ids=_WRONG)
def test_wrong_images_are_named(
    vision: httpx.Client, prompts: list[Any], images: list[Any], param: str
) -> None:
    response = vision.post(GENERATE, json={"prompts": prompts, "images": images})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert f"`{param}" in response.json()["error"]["message"]
