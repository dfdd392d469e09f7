"""Images stay exact over turns: on the chat route and on the token route, inside vLLM and in front of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.acceptance.formats import TOKENS
from tests.campaign.real_vllm.conftest import START_TIMEOUT_S, WAYS, run_way
from tests.campaign.real_vllm.vision import make_vision_model, picture
from tests.support.talk import Conversation, Message, user

pytestmark = pytest.mark.timeout(START_TIMEOUT_S + 300)

_FLAGS = ("--limit-mm-per-prompt", '{"image": 8}', "--max-model-len", "2048", "--enable-scale-out")
_FEW: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "temperature": 1.0, "seed": 7}
RED, BLUE = picture("red"), picture("blue", (64, 64), "JPEG")


@pytest.fixture(scope="module", params=WAYS)
def http(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """Each of the ways to run in turn, with the model of images."""
    folder = tmp_path_factory.mktemp("vision")
    vision_model = make_vision_model(model, folder / "model")
    with (
        run_way(request.param, vision_model, folder / "vllm.log", *_FLAGS) as url,
        httpx.Client(base_url=url, timeout=120) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def pad(http: httpx.Client) -> int:
    """The id of `<image>`."""
    [token] = http.post("/tokenize", json={"prompt": "<image>", "add_special_tokens": False}).json()["tokens"]
    return int(token)


def _image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def _text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


_NEW: list[Message] = [
    {"role": "user", "content": [_text("What is this? "), _image(RED)]},
    user("And now?"),
    {"role": "user", "content": [_image(BLUE), _text("or "), _image(RED), _text("?")]},
    {"role": "tool", "tool_call_id": "c", "content": [_image(BLUE)]},
]


def test_plain_chat_is_exact(http: httpx.Client, pad: int) -> None:
    talk = Conversation(http, [])
    turns = [talk.ask(message, **_FEW) for message in _NEW]
    assert turns[0].source == "rendered: first_turn"
    for turn, before in zip(turns[1:], turns, strict=False):
        assert turn.continues(before)
    assert [turn.prompt_ids.count(pad) for turn in turns] == [4, 4, 12, 16]


def _complete(http: httpx.Client, headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    response = http.post(TOKENS, json={**_FEW, **fields}, headers=headers)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def _next(answer: dict[str, Any]) -> list[int]:
    return [*answer["prompt_token_ids"], *answer["choices"][0]["token_ids"]]


def test_appended_images_are_exact(http: httpx.Client, pad: int) -> None:
    """With a session: the images of earlier turns are those that were recorded."""
    session = {"x-session-id": "s1"}
    answer = _complete(http, session, messages=_NEW[:1])
    said = [_NEW[0]]
    for message in _NEW[1:]:
        ids = _next(answer)
        said += [answer["choices"][0]["message"], message]
        prefix = {"messages": said, "required_prefix_token_ids": ids}
        tokens = http.post("/tokenize", json=prefix).raise_for_status().json()["tokens"]
        answer = _complete(http, session, prompt_ids=ids, append_messages=[message])
        assert answer["prompt_token_ids"][: len(ids)] == ids
        assert answer["prompt_token_ids"] == tokens
    [sample] = http.get("/v1/sessions/s1/samples").json()["samples"]
    whole = sample["prompt_ids"] + sample["completion_ids"]
    assert whole == _next(answer)
    spans = [(each["offset"], each["length"]) for each in sample["images"]]
    assert [whole[start : start + length].count(pad) for start, length in spans] == [4] * 4
    red, blue = (sample["images"][index]["digest"] for index in (0, 1))
    assert [each["digest"] for each in sample["images"]] == [red, blue, red, blue]
    assert sample["image_data"] == {red: RED, blue: BLUE}
    assert sample["messages"][0]["content"][1]["image_url"] == {"url": f"image:{red}"}


def test_images_of_given_ids_come_single_or_expanded(http: httpx.Client, pad: int) -> None:
    expanded = _complete(http, messages=_NEW[:1])["prompt_token_ids"]
    start = expanded.index(pad) - 2
    single = [*expanded[:start], pad, *expanded[start + 7 :]]
    for ids in (single, expanded):
        for url in (RED, RED.partition(",")[2]):  # a data URL, or its base64 alone
            assert _complete(http, prompt_ids=ids, images=[url])["prompt_token_ids"] == expanded
    again = _complete(http, prompt_ids=expanded, images=[RED], append_messages=[_NEW[2]])
    assert again["prompt_token_ids"].count(pad) == 12
    history = _complete(http, prompt_ids=_next(again), messages=[_NEW[0], _NEW[2]])
    assert history["prompt_token_ids"] == _next(again)
