"""Images stay exact over turns: on the chat route and on the token route, inside vLLM and in front of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.demo.stack import EngineProcess
from tests.real_vllm.conftest import FRONT, INSIDE, START_TIMEOUT_S, run_proxy, wait_ready
from tests.real_vllm.plain import CHAT, TOKENS, Conversation, Message, Turn, continues, user
from tests.real_vllm.vision import make_vision_model, picture

pytestmark = pytest.mark.timeout(START_TIMEOUT_S + 300)

_FLAGS = ("--limit-mm-per-prompt", '{"image": 8}', "--max-model-len", "2048")
_FEW = {"max_tokens": 6, "ignore_eos": True, "temperature": 1.0, "seed": 7}
RED, BLUE = picture("red"), picture("blue", (64, 64), "JPEG")


def image(url: str) -> dict[str, Any]:
    """An image part."""
    return {"type": "image_url", "image_url": {"url": url}}


def text(value: str) -> dict[str, Any]:
    """A text part."""
    return {"type": "text", "text": value}


@pytest.fixture(scope="module")
def vision_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(model, tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module", params=[INSIDE, FRONT])
def url(
    request: pytest.FixtureRequest, vision_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Each of the ways to run in turn, with the model of images."""
    log = tmp_path_factory.mktemp("vllm") / "vision.log"
    inside = request.param == INSIDE
    flags = _FLAGS if inside else (*_FLAGS, "--enable-scale-out")
    with EngineProcess(vision_model, plugin=inside, extra_flags=flags, log_file=log) as engine:
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
        assert continues(turn, before)
    placeholder = _placeholder(http)
    assert [turn.prompt_ids.count(placeholder) for turn in turns] == [4, 4, 12, 12]
    # the ids after the sampled turn are those that the engine renders
    rendered = _rendered(http, [_NEW[0], {"role": "assistant", "content": "x"}, _NEW[2]])
    appended = turns[2].prompt_ids[len(turns[1].prompt_ids) + len(turns[1].ids) :]
    assert rendered[-len(appended) + 1 :] == appended[1:]


def _rendered(http: httpx.Client, messages: list[Message]) -> list[int]:
    """The prompt as the engine renders it."""
    body = {"messages": messages, "max_tokens": 1, "return_token_ids": True, "echo": False, "user": "r"}
    answer = http.post(CHAT, json=body).json()
    ids: list[int] = answer["prompt_token_ids"]
    return ids
