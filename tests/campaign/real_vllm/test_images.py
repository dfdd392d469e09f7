"""Images stay exact over turns: on the chat route and on the token route, inside vLLM and in front of it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.demo.stack import EngineProcess
from tests.campaign.real_vllm.conftest import FRONT, INSIDE, START_TIMEOUT_S, Served, run_proxy, wait_ready
from tests.campaign.real_vllm.plain import CHAT, TOKENS, Conversation, Message, continues, user
from tests.campaign.real_vllm.vision import make_vision_model, picture

pytestmark = pytest.mark.timeout(START_TIMEOUT_S + 300)

_FLAGS = ("--limit-mm-per-prompt", '{"image": 8}', "--max-model-len", "2048")
_FEW: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "temperature": 1.0, "seed": 7}
RED, BLUE = picture("red"), picture("blue", (64, 64), "JPEG")


def image(url: str) -> dict[str, Any]:
    """An image part."""
    return {"type": "image_url", "image_url": {"url": url}}


def append(part: object) -> dict[str, Any]:
    """Fields that append a message after a prompt with one image."""
    content = part if isinstance(part, str) else [part]
    return {"images": [RED], "append_messages": [{"role": "user", "content": content}]}


def text(value: str) -> dict[str, Any]:
    """A text part."""
    return {"type": "text", "text": value}


@pytest.fixture(scope="module")
def vision_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(model, tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module", params=[INSIDE, FRONT])
def served(
    request: pytest.FixtureRequest, vision_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Each of the ways to run in turn, with the model of images."""
    log = tmp_path_factory.mktemp("vllm") / "vision.log"
    inside = request.param == INSIDE
    flags = _FLAGS if inside else (*_FLAGS, "--enable-scale-out")
    with EngineProcess(vision_model, plugin=inside, extra_flags=flags, log_file=log) as engine:
        engine.wait_ready(START_TIMEOUT_S)
        if inside:
            wait_ready(engine.url)
            yield Served(engine.url, engine)
        else:
            with run_proxy(engine.url, "--store", "memory:") as front:
                yield Served(front, engine)


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with served.http() as client:
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


def test_an_image_as_a_tool_result_is_exact(http: httpx.Client) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "screenshot", "arguments": "{}"}}
    talk = Conversation(http, [])
    first = talk.ask(user("Take a screenshot."), **_FEW)
    second = talk.ask({"role": "tool", "tool_call_id": call["id"], "content": [image(RED)]}, **_FEW)
    third = talk.ask(user("What is on it?"), **_FEW)
    assert [turn.source for turn in (second, third)] == ["extended", "extended"]
    assert continues(second, first)
    assert continues(third, second)
    assert second.prompt_ids.count(_placeholder(http)) == 4


def test_another_image_at_the_same_place_is_an_edit(http: httpx.Client) -> None:
    talk = Conversation(http, [])
    talk.ask(_NEW[0], **_FEW)
    talk.messages[0] = {"role": "user", "content": [text("What is this? "), image(BLUE)]}
    edited = talk.ask(user("And now?"), **_FEW)
    assert edited.source == "rendered: no_match"


def test_a_stream_is_exact(http: httpx.Client) -> None:
    talk = Conversation(http, [])
    first = talk.ask(_NEW[0], **_FEW)
    body = {"messages": [*talk.messages, _NEW[2]], **_FEW, "stream": True, "return_token_ids": True}
    with http.stream("POST", CHAT, json=body) as response:
        events = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert response.headers["x-prompt-source"] == "extended"
    chunks = [json.loads(event) for event in events[:-1]]
    prompt = next(chunk["prompt_token_ids"] for chunk in chunks if chunk.get("prompt_token_ids"))
    assert prompt[: len(first.prompt_ids) + len(first.ids)] == [*first.prompt_ids, *first.ids]
    assert prompt.count(_placeholder(http)) == 12


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


def test_equal_ids_with_other_images_are_not_continued(http: httpx.Client) -> None:
    """Images of one size take equal ids: only the images tell the turns of two screenshots apart."""
    other = picture("blue")
    sampled: dict[str, Any] = {"logit_bias": {"500": 100.0}, "session": "equal-ids"}
    turns = [
        _complete(http, messages=[{"role": "user", "content": [text("Look: "), image(url)]}], **sampled)
        for url in (RED, other)
    ]
    assert _next(turns[0]) == _next(turns[1])
    ids = _next(turns[0])
    refused = _complete(http, 400, prompt_ids=ids, append_messages=[user("Which?")], session="equal-ids")
    assert (refused["error"]["param"], refused["error"]["code"]) == ("images", "images_missing")
    for url in (RED, other):
        more = [user("Which?")]
        _complete(http, prompt_ids=ids, append_messages=more, images=[url], session="equal-ids")
    samples = http.get("/v1/sessions/equal-ids/samples").json()["samples"]
    urls = {digest: url for sample in samples for digest, url in sample["image_data"].items()}
    assert [len(sample["turns"]) for sample in samples] == [2, 2]
    assert {urls[sample["images"][0]["digest"]] for sample in samples} == {RED, other}


def test_images_on_the_routes_of_trl(http: httpx.Client) -> None:
    """Those of `trl vllm-serve`: next to ids and text, and in messages."""
    expanded = _complete(http, messages=_NEW[:1])["prompt_token_ids"]
    pad, red = _placeholder(http), RED.partition(",")[2]
    start = expanded.index(pad) - 2
    single = [*expanded[:start], pad, *expanded[start + 7 :]]
    few = {"max_tokens": 6, "temperature": 1.0, "n": 2}
    prompts = [single, [1, 4093, 198], expanded, "<image>What?"]
    images = [[red], None, [RED], [BLUE]]
    answer = http.post("/generate/", json={"prompts": prompts, "images": images, **few}).json()
    plain, words = answer["prompt_ids"][1], answer["prompt_ids"][3]
    assert [answer["prompt_ids"][index] for index in (0, 2)] == [expanded, expanded]
    assert (plain, words.count(pad)) == (prompts[1], 4)
    assert all(answer["completion_ids"])
    assert [len(each) for each in answer["logprobs"]] == [len(each) for each in answer["completion_ids"]]
    chat = [[{"role": "user", "content": [text("What is this? "), {"type": "image_pil", "image_pil": red}]}]]
    assert http.post("/chat/", json={"messages": chat, **few}).json()["prompt_ids"] == [expanded]
    refused = http.post("/generate/", json={"prompts": [single], "images": [[red, red]]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "images[0]")


def test_tokenize_appends_images(http: httpx.Client) -> None:
    ids = _next(_complete(http, messages=_NEW[:1]))
    answer = http.post("/tokenize", json={"prompt_ids": ids, "append_messages": [_NEW[2]]}).json()
    assert answer["tokens"][: len(ids)] == ids
    assert answer["tokens"].count(_placeholder(http)) == 12
    assert answer["count"] == len(answer["tokens"])


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"images": []}, "images"),
        ({"images": [RED, RED]}, "images"),
        ({}, "images"),
        ({"images": "x"}, "images"),
        ({"images": [5]}, "images"),
        ({"images": ["data:image/png;base64,AAAA"]}, "images"),
        ({"images": ["data:image/png,AAAA"]}, "images"),
        ({"images": ["data:image/png;base64,???"]}, "images"),
        ({"images": [""]}, "images"),
        ({"images": [RED[:120]]}, "images"),
        ({"images": ["data:text/plain;base64,aGVsbG8="]}, "images"),
        ({"images": ["data:image/svg+xml;base64,PHN2Zy8+"]}, "images"),
        ({"images": ["http://127.0.0.1/x.png"]}, "images"),
        ({"images": ["https://example.com/x.png"]}, "images"),
        ({"images": ["file:///etc/passwd"]}, "images"),
        ({"images": [picture("red", (9000, 8000))]}, "images"),
        (append(image("http://x/y.png")), "append_messages"),
        (append(image("data:,")), "append_messages"),
        (append({"type": "image_url"}), "append_messages"),
        (append({"type": "input_audio"}), "append_messages"),
        (append("<image>"), "append_messages"),
    ],
)
def test_bad_images_are_refused_by_name(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    expanded = _complete(http, messages=_NEW[:1])["prompt_token_ids"]
    response = http.post(TOKENS, json={**_FEW, "prompt_ids": expanded, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "fields",
    [{"stop": ["zzz"]}, {"logprob_token_ids": [5]}, {"mm_processor_kwargs": {}}, {"media_io_kwargs": {}}],
)
def test_recorded_images_are_never_left_out(http: httpx.Client, fields: dict[str, Any]) -> None:
    """Requests that the engine takes without images only are refused: it would read placeholders as text."""
    ids = _next(_complete(http, messages=_NEW[:1], session="never-left-out"))
    for new in ({}, {"append_messages": [user("Go on.")]}):
        refused = _complete(http, 400, prompt_ids=ids, session="never-left-out", **new, **fields)
        assert (refused["error"]["param"], refused["error"]["code"]) == ("prompt_ids", "no_images")


@pytest.mark.parametrize("images", [None, [RED]])
def test_an_id_of_more_than_32_bits_next_to_images_is_refused_by_name(
    http: httpx.Client, images: list[str] | None
) -> None:
    expanded = _complete(http, messages=_NEW[:1])["prompt_token_ids"]
    refused = _complete(http, 400, prompt_ids=[*expanded, 2**40], images=images)
    assert refused["error"]["param"] == "prompt_ids"


def test_a_bad_image_in_a_chat_is_refused_by_name(http: httpx.Client) -> None:
    content = [text("What?"), image("data:image/png;base64,AAAA")]
    response = http.post(CHAT, json={"messages": [{"role": "user", "content": content}]})
    assert response.status_code == 400
    assert "messages[0].content[1]" in response.json()["error"]["message"]


@pytest.mark.parametrize("served", [FRONT], indirect=True)
def test_another_process_goes_on_with_recorded_images(served: Served, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/rollouts.db"
    with (
        run_proxy(served.engine.url, "--store", store) as url,
        httpx.Client(base_url=url, timeout=120) as http,
    ):
        talk = Conversation(http, [])
        first = talk.ask(_NEW[0], **_FEW)
        ids = _next(_complete(http, messages=_NEW[:1], session="s"))
    with (
        run_proxy(served.engine.url, "--store", store) as url,
        httpx.Client(base_url=url, timeout=120) as http,
    ):
        talk.http = http
        second = talk.ask(_NEW[2], **_FEW)
        assert second.source == "extended"
        assert continues(second, first)
        answer = _complete(http, prompt_ids=ids, append_messages=[_NEW[2]], session="s")
        assert answer["prompt_token_ids"][: len(ids)] == ids
