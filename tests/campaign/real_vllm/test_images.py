"""Images stay exact over turns: on the chat route and on the token route, inside vLLM and in front of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.acceptance.formats import TOKENS
from tests.campaign.real_vllm.conftest import (
    FRONT,
    INSIDE,
    START_TIMEOUT_S,
    run_proxy,
    start_engine,
    wait_ready,
)
from tests.campaign.real_vllm.vision import make_vision_model, picture
from tests.support.talk import Conversation, Message, user

pytestmark = pytest.mark.timeout(START_TIMEOUT_S + 300)

_FLAGS = ("--limit-mm-per-prompt", '{"image": 8}', "--max-model-len", "2048")
_FEW: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "temperature": 1.0, "seed": 7}
RED, BLUE = picture("red"), picture("blue", (64, 64), "JPEG")


def image(url: str) -> dict[str, Any]:
    """An image part."""
    return {"type": "image_url", "image_url": {"url": url}}


def text(value: str) -> dict[str, Any]:
    """A text part."""
    return {"type": "text", "text": value}


@pytest.fixture(scope="module", params=[INSIDE, FRONT])
def url(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Each of the ways to run in turn, with the model of images."""
    folder = tmp_path_factory.mktemp("vision")
    inside = request.param == INSIDE
    vision_model = make_vision_model(model, folder / "model")
    with start_engine(
        vision_model, folder / "vllm.log", *_FLAGS, "--enable-scale-out", plugin=inside
    ) as engine:
        engine.wait_ready(START_TIMEOUT_S)
        if inside:
            wait_ready(engine.url)
            yield engine.url
        else:
            with run_proxy(engine.url, "--store", "memory:") as front:
                yield front


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=120) as client:
        yield client


def _placeholder(http: httpx.Client) -> int:
    """The id of `<image>`."""
    [token] = http.post("/tokenize", json={"prompt": "<image>", "add_special_tokens": False}).json()["tokens"]
    return int(token)


_NEW: list[Message] = [
    {"role": "user", "content": [text("What is this? "), image(RED)]},
    user("And now?"),
    {"role": "user", "content": [image(BLUE), text("or "), image(RED), text("?")]},
    user("Thanks."),
]


def test_plain_chat_is_exact(http: httpx.Client) -> None:
    talk = Conversation(http, [])
    turns = [talk.ask(message, **_FEW) for message in _NEW]
    assert [turn.source for turn in turns] == ["rendered: first_turn", *["extended"] * 3]
    for turn, before in zip(turns[1:], turns, strict=False):
        assert turn.continues(before)
    placeholder = _placeholder(http)
    assert [turn.prompt_ids.count(placeholder) for turn in turns] == [4, 4, 12, 12]


def test_an_image_as_a_tool_result_is_exact(http: httpx.Client) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "screenshot", "arguments": "{}"}}
    talk = Conversation(http, [])
    first = talk.ask(user("Take a screenshot."), **_FEW)
    second = talk.ask({"role": "tool", "tool_call_id": call["id"], "content": [image(RED)]}, **_FEW)
    third = talk.ask(user("What is on it?"), **_FEW)
    assert [turn.source for turn in (second, third)] == ["extended", "extended"]
    assert second.continues(first)
    assert third.continues(second)
    assert second.prompt_ids.count(_placeholder(http)) == 4


# --- the token route


def _complete(http: httpx.Client, status: int = 200, **fields: Any) -> dict[str, Any]:
    session = fields.pop("session", None)
    headers = {"x-session-id": session} if session else {}
    response = http.post(TOKENS, json={**_FEW, **fields}, headers=headers)
    assert response.status_code == status, response.text
    answer: dict[str, Any] = response.json()
    return answer


def _next(answer: dict[str, Any]) -> list[int]:
    return [*answer["prompt_token_ids"], *answer["choices"][0]["token_ids"]]


def test_appended_images_are_exact(http: httpx.Client) -> None:
    """With a session: the images of earlier turns are those that were recorded."""
    answer = _complete(http, messages=_NEW[:1], session="s1")
    for message in (*_NEW[1:], {"role": "tool", "tool_call_id": "c", "content": [image(BLUE)]}):
        ids = _next(answer)
        answer = _complete(http, prompt_ids=ids, append_messages=[message], session="s1")
        assert answer["prompt_token_ids"][: len(ids)] == ids
    assert answer["prompt_token_ids"].count(_placeholder(http)) == 16
    [sample] = http.get("/v1/sessions/s1/samples").json()["samples"]
    whole = sample["prompt_ids"] + sample["completion_ids"]
    assert whole == _next(answer)
    spans = [(each["offset"], each["length"]) for each in sample["images"]]
    assert [whole[start : start + length].count(_placeholder(http)) for start, length in spans] == [4] * 4
    red, blue = (sample["images"][index]["digest"] for index in (0, 1))
    assert [each["digest"] for each in sample["images"]] == [red, blue, red, blue]
    assert sample["image_data"] == {red: RED, blue: BLUE}
    assert sample["messages"][0]["content"][1]["image_url"] == {"url": f"image:{red}"}


def test_images_of_given_ids_come_single_or_expanded(http: httpx.Client) -> None:
    pad = _placeholder(http)
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
