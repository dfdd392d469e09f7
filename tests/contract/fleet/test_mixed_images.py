"""A fleet of which only some replicas take images with exact ids: sessions with images run on these."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.fake_vision import PLACEHOLDER, FakeVision, ids_of_image, picture
from tests.support.fake_vllm import FakeVllm
from tests.support.talk import user
from tests.support.tiny_model import HI, TinyModel
from tests.support.utils import run_proxy, wait_until

TOKENS, CHAT, GENERATE = "/v1/chat/completions/tokens", "/v1/chat/completions", "/inference/v1/generate"
RED = picture("red")


@pytest.fixture
def engines(tiny_model: TinyModel) -> Iterator[tuple[FakeVllm, FakeVllm, FakeVision]]:
    """Two engines that take no images, and one that does."""
    with FakeVllm(tiny_model) as one, FakeVllm(tiny_model) as other, FakeVision(tiny_model) as vision:
        yield one, other, vision


@pytest.fixture
def client(engines: tuple[FakeVllm, FakeVllm, FakeVision]) -> Iterator[httpx.Client]:
    with run_proxy(engines) as client:
        yield client


def _complete(client: httpx.Client, session: str = "", status: int = 200, **fields: Any) -> Any:
    headers = {"x-session-id": session} if session else {}
    answer = client.post(TOKENS, json={"max_tokens": 4, **fields}, headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()


def _turns(engine: FakeVllm, path: str) -> int:
    bodies = [seen.json for seen in engine.seen(path)]
    return sum((body.get("sampling_params") or body).get("max_tokens") != 1 for body in bodies)


def _next(answer: Any) -> list[int]:
    return [*answer["prompt_token_ids"], *answer["choices"][0]["token_ids"], 75]


def test_a_session_with_images_runs_where_images_are_taken(
    client: httpx.Client, engines: tuple[FakeVllm, FakeVllm, FakeVision]
) -> None:
    one, other, vision = engines
    expanded = [1, *ids_of_image(RED), 74]
    body = {"prompt_ids": [1, PLACEHOLDER, *HI], "images": [RED], "append_messages": [user("hi")]}
    for number in range(2):
        session = f"images-{number}"
        answer = _complete(client, session, prompt_ids=[1, PLACEHOLDER, 74], images=[RED])
        assert answer["prompt_token_ids"] == expanded
        for _ in range(3):  # with the images that were recorded
            ids = _next(answer)
            answer = _complete(client, session, prompt_ids=ids)
            assert answer["prompt_token_ids"] == ids
        [sample] = client.get(f"/v1/sessions/{session}/samples").json()["samples"]
        assert (len(sample["turns"]), len(sample["images"])) == (4, 1)
        tokens = client.post("/tokenize", json=body).json()["tokens"]
        assert tokens[: len(ids_of_image(RED)) + 1] == [1, *ids_of_image(RED)], "also to tokenise them"
    assert [_turns(engine, CHAT) for engine in (one, other)] == [0, 0]
    assert _turns(vision, GENERATE) == 8
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{RED}"}}
    message = {"role": "user", "content": [image, {"type": "text", "text": "hi"}]}
    assert client.post(CHAT, json={"messages": [message], "max_tokens": 4}).status_code == 200
    assert [_turns(engine, CHAT) for engine in (one, other, vision)] == [0, 0, 1]
    for number in range(6):  # text runs everywhere
        _complete(client, f"text-{number}", prompt_ids=[1, 74, 75 + number])
    assert min(_turns(one, CHAT), _turns(other, CHAT)) > 0


def test_without_a_replica_for_images_a_request_may_be_repeated(
    client: httpx.Client, engines: tuple[FakeVllm, FakeVllm, FakeVision], tiny_model: TinyModel
) -> None:
    vision = engines[2]
    answer = _complete(client, "s", prompt_ids=[1, PLACEHOLDER, 74], images=[RED])
    vision.kill()
    wait_until(lambda: not client.get("/ready").json()["engines"][2]["ready"])
    lost = (
        {"prompt_ids": [1, PLACEHOLDER], "images": [RED]},
        {"prompt_ids": _next(answer)},  # the images of the session
    )
    for fields in lost:
        refused = _complete(client, "s", 503, **fields)
        assert vision.url in refused["error"]["message"]
    _complete(client, prompt_ids=[1, 74])
    with FakeVision(tiny_model, port=vision.port):
        wait_until(lambda: client.get("/ready").json()["engines"][2]["ready"])
        assert _complete(client, "s", prompt_ids=_next(answer))["prompt_token_ids"] == _next(answer)
