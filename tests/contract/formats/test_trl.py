"""The routes of `trl vllm-serve`, as the clients of TRL up to 1.10 call them."""

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from tests.support.fake_vision import PLACEHOLDER, FakeVision, ids_of_image, picture
from tests.support.fake_vllm import MAX_MODEL_LEN, FakeVllm, Reply
from tests.support.talk import user
from tests.support.tiny_model import END, HI, TinyModel
from tests.support.utils import EVERY_SPELLING, run_proxy
from tokenproxy.base.errors import EngineBroken
from tokenproxy.formats.trl import TrlAnswer, batch_answer
from tokenproxy.turn import parsing
from tokenproxy.turn.reader import read_completion

GENERATE, BATCH_CHAT = "/generate/", "/chat/"
REPLY = (74, 71, END)
WHOLE: dict[str, Any] = {
    **{"n": 1, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0},
    **{"max_tokens": 16, "logprobs": 0, "structured_outputs_regex": None, "generation_kwargs": {}},
}
"""The fields that TRL's client sends each time, next to the prompts."""


def _post(client: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    response = client.post(path, json={**WHOLE, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@EVERY_SPELLING
def test_a_batch_of_ids(client: httpx.Client, fake: FakeVllm) -> None:
    fake.replies += [Reply(REPLY)] * 3
    prompts = [[1, 74, 75], [1, 90], [1, 74, 75]]
    answer = _post(client, GENERATE, prompts=prompts, images=None)
    assert answer["prompt_ids"] == prompts
    assert answer["completion_ids"] == [list(REPLY)] * 3
    assert answer["logprob_token_ids"] == [[[token] for token in REPLY]] * 3
    assert answer["logprobs"] == [[[-token / 8] for token in REPLY]] * 3


def test_prompts_of_all_kinds_in_a_batch(client: httpx.Client, tiny_model: TinyModel) -> None:
    prompts = ["hello", [1, 74], [user("Hi, TRL")]]
    answer = _post(client, GENERATE, prompts=prompts, images=[None, None, None])
    assert answer["prompt_ids"][1:] == [[1, 74], tiny_model.render([user("Hi, TRL")])]
    assert answer["prompt_ids"][0] == client.post("/tokenize", json={"prompt": "hello"}).json()["tokens"]


def test_rendering_with_tools(client: httpx.Client, fake: FakeVllm, tiny_model: TinyModel) -> None:
    function = {"name": "f", "description": None, "parameters": None}
    tools = [{"type": "function", "function": function}]
    kwargs = {"enable_thinking": False}
    messages = [[user("One")], [user("Two")]]
    answer = _post(client, BATCH_CHAT, messages=messages, tools=tools, chat_template_kwargs=kwargs)
    assert answer["prompt_ids"] == [tiny_model.render(each, tools=tools, **kwargs) for each in messages]
    assert all(seen.json["tool_choice"] == "none" for seen in fake.generations()[-2:])


def test_conversations_are_continued_exactly(client: httpx.Client, fake: FakeVllm) -> None:
    fake.replies.append(Reply((74, 71, 78, 78, 81, END)))
    first = _post(client, BATCH_CHAT, messages=[[user("Go on, TRL")]])
    before = first["prompt_ids"][0] + first["completion_ids"][0]
    said = {"role": "assistant", "content": "hello"}
    second = _post(client, BATCH_CHAT, messages=[[user("Go on, TRL"), said, user("more")]])
    assert second["prompt_ids"][0][: len(before)] == before


def test_sampling_parameters_reach_the_engine(client: httpx.Client, fake: FakeVllm) -> None:
    more = {"seed": 7, "stop_token_ids": [90], "temperature": 0.5, "n": 2}
    sampling = {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "max_tokens": 9, "repetition_penalty": 1.1}
    named = {"logprobs": 3, "structured_outputs_regex": "a+", "generation_kwargs": more}
    _post(client, GENERATE, prompts=[[1, 74]], **sampling, **named)
    body = fake.generations()[-1].json
    wanted = {**sampling, **more, "top_logprobs": 3, "logprobs": True, "structured_outputs": {"regex": "a+"}}
    assert {name: body[name] for name in wanted} == wanted


_WRONG: list[tuple[str, dict[str, Any]]] = [
    ("prompts", {"prompts": "Hi"}),
    ("prompts", {"prompts": [[1]] * 4097}),
    ("prompts[1]", {"prompts": [[1], []]}),
    ("prompts[1]", {"prompts": [[1], [1] * (MAX_MODEL_LEN + 1)]}),
    ("temperature", {"prompts": [[1]], "temperature": "hot"}),
    ("generation_kwargs.a", {"prompts": [[1]], "generation_kwargs": {"a": 1}}),
    ("images", {"prompts": [[1], [2]], "images": [None]}),
    ("images[1]", {"prompts": [[1], "Hi"], "images": [None, ["AA=="]]}),  # the model takes none
]


@pytest.mark.parametrize(("param", "fields"), _WRONG)
def test_wrong_fields_are_named(client: httpx.Client, param: str, fields: dict[str, Any]) -> None:
    response = client.post(GENERATE, json=fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def _answer(body: bytes) -> TrlAnswer:
    answer = TrlAnswer(logprobs=True)
    whole = parsing.parse(body)
    answer.whole(whole, body, read_completion(whole))
    return answer


def _completion(*positions: tuple[float, dict[int, float]]) -> bytes:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": f"token_id:{token}", "logprob": logprob}

    content = [
        {**entry(7, logprob), "top_logprobs": [entry(*each) for each in top.items()]}
        for logprob, top in positions
    ]
    choice = {"index": 0, "token_ids": [7] * len(positions), "logprobs": {"content": content}}
    return json.dumps({"prompt_token_ids": [1], "choices": [choice]}).encode()


def test_log_probabilities_are_sorted_and_not_a_number_is_null() -> None:
    outside = (-3.0, {5: -2.0, 4: -0.1})
    within = (-0.5, {7: -0.5, 9: -1.0})
    answer = _answer(_completion(outside, within, (math.nan, {7: math.nan, 9: -1.0})))
    body = json.loads(msgspec.json.encode(batch_answer([answer])))
    assert body["logprob_token_ids"] == [[[4, 5, 7], [7, 9], [9, 7]]]
    assert body["logprobs"] == [[[-0.1, -2.0, -3.0], [-0.5, -1.0], [-1.0, None]]]


@pytest.mark.parametrize("missing", ["prompt_token_ids", "token_ids", "logprobs"])
def test_completions_without_evidence_are_errors(missing: str) -> None:
    """A trainer must not get a batch in which ids are missing."""
    with pytest.raises(EngineBroken):
        _answer(_completion((-1.0, {})).replace(f'"{missing}"'.encode(), b'"x"'))


RED, WIDE = picture("red"), picture("blue", 30)
DATA_URL = f"data:image/png;base64,{WIDE}"


@pytest.fixture(scope="module")
def vision(tiny_model: TinyModel) -> Iterator[httpx.Client]:
    with FakeVision(tiny_model) as engine, run_proxy([engine]) as client:
        yield client


def test_each_prompt_has_its_images_or_none(vision: httpx.Client) -> None:
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


def test_images_in_messages(vision: httpx.Client) -> None:
    """TRL's client sends them as base64 in parts of type `image_pil`."""
    kinds = [
        {"type": "image_pil", "image_pil": RED},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{RED}"}},
    ]
    messages = [[{"role": "user", "content": [kind, {"type": "text", "text": "hi"}]}] for kind in kinds]
    first, second = _post(vision, BATCH_CHAT, messages=messages)["prompt_ids"]
    image = ids_of_image(RED)
    start = first.index(image[0])
    assert first == second and first[start : start + len(image)] == image


def test_wrong_images(vision: httpx.Client) -> None:
    for images in ([RED, RED], ["AAAA"], ["http://127.0.0.1/x.png"]):
        asked = {"prompts": [[1, 75], [1, PLACEHOLDER]], "images": [None, images]}
        response = vision.post(GENERATE, json=asked)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "images[1]"), response.text
