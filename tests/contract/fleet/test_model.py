"""A fleet serves one model with one way to render: a replica that differs is not ready, and says why."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from chat_tokenizer import ChatTokenizer
from tests.contract.fleet.memory_engine import MemoryEngine, answers, ask, engines, fleet_of, gone, replica_of
from tests.contract.fleet.replicas import Start, state_of
from tests.support.fake_vision import FakeVision, picture
from tests.support.fake_vllm import FakeVllm, Reply, Variant
from tests.support.stepped import elapse, settled, stepped
from tests.support.talk import appended_after, sent_ids, user
from tests.support.tiny_model import CHATML, SPLIT, TinyModel
from tests.support.utils import run_proxy, send_and_keep, wait_until
from tokenproxy.base.errors import Unsupported
from tokenproxy.engine.discovery import Model
from tokenproxy.engine.protocol import Engine
from tokenproxy.fleet.choosing import sticky_least_loaded
from tokenproxy.fleet.tokenizers import Tokenizers
from tokenproxy.monitoring.metrics import ReplicaState

_CHAT, _TOKENS, _ADMIN = "/v1/chat/completions", "/v1/chat/completions/tokens", "/admin/replicas"
_HI = {"role": "user", "content": "Hi"}
_IDS = {"prompt_ids": [1, 74]}
_JSON = {"content-type": "application/json"}


def _report(client: httpx.Client, engine: FakeVllm) -> Any:
    engines = client.get("/ready").json()["engines"]
    return next((each for each in engines if each["engine"] == engine.url), {})


def _join(client: httpx.Client, engine: FakeVllm, state: str) -> None:
    """Add a replica, and wait until it is in a state."""
    assert client.post(_ADMIN, json={"url": engine.url}).status_code == 200
    wait_until(lambda: state_of(client, engine) == state)


def _other_name(engine: FakeVllm) -> None:
    engine.names = ["other"]


def _shorter_context(engine: FakeVllm) -> None:
    engine.max_model_len = 2048


def _no_ids(engine: FakeVllm) -> None:
    engine.variant = Variant.NEITHER


def _prints_a_field(engine: FakeVllm) -> None:
    engine.rendered_fields = ("tool_choice",)


def _other_logprobs(engine: FakeVllm) -> None:
    engine.only_logprobs = {0: [0.0], 1: [0.0]}


def _other_template(engine: FakeVllm) -> None:
    engine.chat_template = CHATML.replace("'<|im_start|>' + message.role", "'<|im_start|>' + 'user'")
    assert engine.chat_template != CHATML


@pytest.mark.parametrize(
    "change, problem",
    [
        (_other_name, "its model is 'other', not 'tiny'"),
        (_shorter_context, "its context length is 2048, not 4096"),
        (_no_ids, "its route for prompt ids is none, not chat"),
        (_prints_a_field, "its list of rendered fields is tool_choice, not empty"),
        (_other_logprobs, "its logprobs mode is processed_logprobs, not raw_logprobs"),
        (_other_template, "it renders with another tokenizer or chat template"),
    ],
)
def test_a_replica_that_differs_is_not_ready_and_says_why(
    start: Start, change: Callable[[FakeVllm], None], problem: str
) -> None:
    first, other = start(), start()
    change(other)
    with run_proxy([first], store="memory:") as client:
        _join(client, other, "different")
        report = _report(client, other)
        assert not report["ready"]
        assert report["problem"].startswith(f"{other.url} differs from the model that the fleet serves: ")
        assert problem in report["problem"]
        for number in range(6):
            answer = client.post(_CHAT, json={"messages": [{"role": "user", "content": f"Hi {number}"}]})
            assert answer.status_code == 200
        assert (len(first.generations()), len(other.generations())) == (6, 0)
        if change is _no_ids:  # images need other routes than these two engines have
            vision = start(FakeVision)
            _join(client, vision, "different")
            assert "its placeholder of images is 0, not none" in _report(client, vision)["problem"]


def test_another_model_is_served_once_no_replica_with_the_first_responds(
    start: Start,
) -> None:
    """Nothing is continued with it. A replica with the first model that comes back then differs."""
    old, new = start(), start()
    _other_name(new)
    with run_proxy([old], store="memory:") as client:
        _join(client, new, "different")
        first = client.post(_CHAT, json={"messages": [_HI]})
        messages = [_HI, first.json()["choices"][0]["message"], {"role": "user", "content": "more"}]
        old.kill()
        wait_until(lambda: _report(client, new)["ready"])
        assert state_of(client, new) == "ready"
        answer = client.post(_CHAT, json={"messages": messages})
        assert (answer.headers["x-prompt-source"], answer.headers["x-prompt-reason"]) == (
            "rendered",
            "model_changed",
        )
        start(port=old.port)
        wait_until(lambda: state_of(client, old) == "different")
        assert "its model is 'tiny', not 'other'" in _report(client, old)["problem"]


def test_a_drained_replica_leaves_its_place_to_another_model(start: Start) -> None:
    """A request that was planned for the first model and waited meanwhile gets a 503, not its ids."""
    old, new = start(), start()
    _other_name(new)
    with run_proxy([old], store="memory:", replica_requests=1) as client, ExitStack() as stack:
        _join(client, new, "different")
        old.replies.append(Reply(hold_at=0))
        stack.enter_context(send_and_keep(client.base_url, _TOKENS, b'{"prompt_ids": [1, 74]}'))
        wait_until(lambda: old.running == 1)
        answers: list[httpx.Response] = []
        waiting = threading.Thread(
            target=lambda: answers.append(client.post(_TOKENS, json={"prompt_ids": [1, 75]}))
        )
        waiting.start()
        wait_until(lambda: "tokenproxy_requests_queued 1.0" in client.get("/metrics").text)
        client.post(f"{_ADMIN}/drain", json={"url": old.url})
        waiting.join()
        [answer] = answers
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        assert "another model" in answer.json()["error"]["message"]
        assert len(new.generations()) == 0
        assert client.post(_TOKENS, json={"prompt_ids": [1, 75]}).status_code == 200
        assert len(new.generations()) == 1
        old.release()
        client.post(_ADMIN, json={"url": old.url})
        wait_until(lambda: state_of(client, old) == "different")


def test_no_ids_go_to_an_engine_that_came_back_with_another_model(start: Start) -> None:
    """Between two health checks, and without a request that the restart broke."""
    first = start()
    with run_proxy([first], watch_interval_s=60.0) as client:
        asked = len(first.seen("/v1/models"))
        for _ in range(3):
            assert client.post(_TOKENS, json=_IDS).status_code == 200
        connections = sum(not seen.reused for seen in first.seen(_CHAT))
        assert len(first.seen("/v1/models")) <= asked + 1 + connections, "once for each connection"
        first.kill()
        same = start(port=first.port)
        assert client.post(_TOKENS, json=_IDS).status_code == 200
        assert same.seen("/v1/models")
        same.kill()
        other = start(port=first.port)
        _other_name(other)
        refused = client.post(_TOKENS, json=_IDS)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        assert "another model" in refused.json()["error"]["message"]
        assert len(other.generations()) == 0
        wait_until(
            lambda: [each.get("model") for each in client.get("/ready").json()["engines"]] == ["other"]
        )
        assert client.post(_TOKENS, json=_IDS).status_code == 200
        assert len(other.generations()) == 1


def test_after_a_failure_another_replica_gets_the_same_prompt(start: Start, tiny_model: TinyModel) -> None:
    first, second = start(), start()
    with run_proxy([first, second], store="memory:", watch_interval_s=60.0) as client:
        for engine in (first, second):
            engine.replies.append(Reply(SPLIT))
        answer = client.post(_CHAT, json={"messages": [_HI], "return_token_ids": True}).json()
        [choice] = answer["choices"]
        served, other = (second, first) if first.replies else (first, second)
        served.kill()
        again = client.post(_CHAT, json={"messages": [_HI, choice["message"], user("more")]})
        assert again.headers["x-prompt-source"] == "extended"
        before = [*answer["prompt_token_ids"], *choice["token_ids"]]
        assert sent_ids(other) == [*before, *appended_after(tiny_model, before, [user("more")])]


def test_any_replica_tells_the_ids_of_an_image(start: Start) -> None:
    first, second = start(FakeVision), start(FakeVision)
    with run_proxy([first, second], store="memory:", watch_interval_s=60.0) as client:
        first.kill()
        for color in ("red", "green", "blue"):
            body = {"prompt_ids": [1, 0, 74], "images": [picture(color)], "max_tokens": 4}
            assert client.post(_TOKENS, json=body).status_code == 200


class _LateHub(Tokenizers):
    """Finds a tokenizer for every engine but one, from some time on."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        super().__init__()
        self.tokenizer: ChatTokenizer | None = None
        self.late = tokenizer
        self.mismatch = ""

    async def find(self, engine: Engine, model: Model | None) -> ChatTokenizer:
        if engine.name == self.mismatch:
            raise Unsupported("renders other ids", code="tokenizer_mismatch")
        if self.tokenizer is None:
            raise Unsupported("the hub does not respond", code="no_tokenizer")
        return self.tokenizer


@stepped
async def test_the_fleet_gets_the_tokenizer_that_is_found_later(tiny_model: TinyModel) -> None:
    """All replicas are compared with it at once. One whose engine renders other ids then differs."""
    all_engines = engines(3)
    hub = _LateHub(ChatTokenizer.load(str(tiny_model.folder)))
    hub.mismatch = all_engines[0].name
    async with fleet_of(choose=sticky_least_loaded) as fleet:
        for engine in all_engines:
            fleet.add(replica_of(engine, 5.0, hub))
        await settled()
        assert fleet.model is not None
        assert fleet.model.tokenizer is None
        assert [replica.state for replica in fleet.replicas] == [ReplicaState.READY] * 3
        await elapse(20.0)
        hub.tokenizer = hub.late
        await elapse(16.0)
        assert fleet.model.tokenizer is hub.late
        assert [replica.state for replica in fleet.replicas] == [
            ReplicaState.DIFFERENT,
            ReplicaState.READY,
            ReplicaState.READY,
        ]
        assert "its rendering is not verified: renders other ids" in fleet.report()[0]["problem"]
        assert (await ask(fleet))[0] == 200
        assert all_engines[0].started == 0


def _named(engine: MemoryEngine, name: str) -> MemoryEngine:
    engine.model = name
    return engine


@stepped
async def test_the_model_stays_while_one_replica_with_it_responds() -> None:
    """After that it is the model of the first replica in the order of the fleet that responds."""
    old, last_old, new, newer = all_engines = engines(4)
    async with fleet_of(old, last_old, interval_s=1.0) as fleet:
        fleet.add(replica_of(_named(new, "new"), 1.0))
        fleet.add(replica_of(_named(newer, "newer"), 1.0))
        await settled()
        gone(old)
        await elapse(2.0)
        assert [replica.ready for replica in fleet.replicas] == [False, True, False, False]
        fleet.remove(fleet.replicas[1])
        assert [replica.ready for replica in fleet.replicas] == [False, True, False]
        old.gone = None
        await elapse(2.0)
        assert [replica.state for replica in fleet.replicas] == [
            ReplicaState.DIFFERENT,
            ReplicaState.READY,
            ReplicaState.DIFFERENT,
        ]
        assert (await ask(fleet))[0] == 200
        assert [engine.started for engine in all_engines] == [0, 0, 1, 0]


@stepped
async def test_a_wrong_replica_that_responds_first_does_not_decide_the_model() -> None:
    """Until all replicas of the start were asked, it is the model that most of them have."""
    wrong, *others = engines(8)
    async with fleet_of(_named(wrong, "wrong"), *others) as fleet:
        for number in range(30):
            assert (await ask(fleet, str(number)))[0] == 200
        assert wrong.started == 0
        assert [replica.state for replica in fleet.replicas] == [
            ReplicaState.DIFFERENT,
            *[ReplicaState.READY] * 7,
        ]


@stepped
async def test_a_404_is_no_sign_of_low_load() -> None:
    """A replica that lacks a model gets no requests for it for a while; one with another model differs."""
    first, second = engines(2)
    first.usual = answers(404)
    async with fleet_of(first, second) as fleet:
        for _ in range(3):
            assert (await ask(fleet, model="adapter"))[0] == 200
        assert (first.started, second.started) == (1, 3)
        assert (await ask(fleet, model="tiny"))[0] == 200
        assert first.started == 2
        second.replies = [answers(404)]
        await elapse(11.0)
        assert (await ask(fleet, model="unknown"))[0] == 404
        assert [replica.state for replica in fleet.replicas] == [ReplicaState.READY] * 2
        _named(first, "other")
        assert (await ask(fleet, model="adapter"))[0] == 200
        await settled()
        assert [replica.state for replica in fleet.replicas] == [ReplicaState.DIFFERENT, ReplicaState.READY]
