"""What every wire format promises: exact turns, retries, records of broken turns, errors of its own."""

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.support.fake_vllm import Canned, FakeVllm, Reply, Variant, error_body
from tests.support.message_shapes import user
from tests.support.scraping import Scrape, grown
from tests.support.talk import CHAT, GENERATE, appended_after
from tests.support.tiny_model import SPLIT, TinyModel
from tests.support.utils import Pair, run_proxy, wait_until

COMPLETIONS = "/v1/completions"
_NEW = [5, 9]
Body = dict[str, Any]


@dataclass(frozen=True)
class Format:
    """A wire format: its requests, and how its streams end."""

    name: str
    path: str
    first: Callable[[str], Body]
    """A conversation's first request, of a text that nobody else sends."""
    more: Callable[[Body, list[int]], Body]
    """The request after it; the ids are all that were read and sampled."""
    ended: bytes = b"data: [DONE]"
    """How the last event of a complete stream begins."""
    failed: bytes = b'data: {"error":'
    """How the last event of a broken stream begins."""
    translated: bool = False
    """Whether it is another format than that of the engine."""
    text: bool = True
    """Whether it sends messages after the first turn, whose ids the proxy finds."""


def _ids(text: str) -> list[int]:
    return [3 + byte % 200 for byte in text.encode()]


def _said(first: Body) -> list[Body]:
    return [*first["messages"], {"role": "assistant", "content": "hello"}, user("more")]


_ALL = [
    Format(
        "chat", CHAT, lambda text: {"messages": [user(text)]}, lambda first, ids: {"messages": _said(first)}
    ),
    Format(
        *("tokens", f"{CHAT}/tokens", lambda text: {"messages": [user(text)]}),
        lambda first, ids: {"prompt_ids": ids, "append_messages": [user("more")]},
    ),
    Format(
        *("messages", "/v1/messages"),
        lambda text: {"model": "tiny", "max_tokens": 99, "messages": [user(text)]},
        lambda first, ids: {**first, "messages": _said(first)},
        b"event: message_stop",
        b'event: error\ndata: {"type":"error"',
        translated=True,
    ),
    Format(
        *("responses", "/v1/responses", lambda text: {"input": [user(text)]}),
        lambda first, ids: {"input": _said({"messages": first["input"]})},
        b"event: response.completed",
        b"event: error\n",
        translated=True,
    ),
    Format(
        *("completions", COMPLETIONS, lambda text: {"prompt": _ids(text)}),
        lambda first, ids: {"prompt": [*ids, *_NEW]},
        text=False,
    ),
    Format(
        *("generate", GENERATE, lambda text: {"token_ids": _ids(text), "sampling_params": {}}),
        lambda first, ids: {"token_ids": [*ids, *_NEW], "sampling_params": {}},
        text=False,
    ),
]
_FORMATS = {form.name: form for form in _ALL}
_NEEDS = {"completions": [Variant.CHAT], "generate": [Variant.SCALE_OUT]}
_CELLS = [
    pytest.param(variant, form, id=f"{form.name}-{variant}")
    for form in _ALL
    for variant in _NEEDS.get(form.name, [Variant.CHAT, Variant.SCALE_OUT])
]
every_format = pytest.mark.parametrize(("pair", "form"), _CELLS, indirect=["pair"])
each_format = pytest.mark.parametrize(
    ("pair", "form"),
    [pytest.param(_NEEDS.get(form.name, [Variant.CHAT])[0], form, id=form.name) for form in _ALL],
    indirect=["pair"],
)
every_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@dataclass
class Caller:
    """A client of one format with a session of its own."""

    client: httpx.Client
    form: Format
    headers: dict[str, str]
    first: Body

    def post(self, body: Body | None = None, *, stream: bool = False, **headers: str) -> httpx.Response:
        """The first request, or another one."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        sent = {**(body or self.first), "stream": stream}
        return self.client.post(self.form.path, json=sent, headers={**self.headers, **named})

    def turns(self) -> list[Body]:
        """What the session recorded."""
        session = f"/v1/sessions/{self.headers['x-session-id']}?ids=true"
        found: list[Body] = self.client.get(session, headers=self.headers).json().get("turns", [])
        return found


def _caller(client: httpx.Client, form: Format) -> Caller:
    name = secrets.token_hex(8)
    return Caller(client, form, {"x-session-id": name}, form.first(f"Hi {name}"))


@pytest.fixture
def caller(pair: Pair, form: Format) -> Caller:
    return _caller(pair.client, form)


def _last_event(content: bytes) -> bytes:
    return content.removesuffix(b"\n\n").rpartition(b"\n\n")[2]


def _sent(fake: FakeVllm) -> list[int]:
    """The ids of the last prompt that the engine was given."""
    last = fake.generations()[-1]
    path, body = last.path, last.json
    if path == CHAT:
        body = body["kv_transfer_params"]
    ids: list[int] = body[{CHAT: "prompt_token_ids", GENERATE: "token_ids", COMPLETIONS: "prompt"}[path]]
    return ids


def _message(form: Format, answer: httpx.Response) -> str:
    """The message of an error, in the format's own envelope."""
    body = answer.json()
    assert (body.get("type") == "error") is (form.name == "messages")
    message: str = body["error"]["message"]
    return message


@every_way
@every_format
def test_a_turn_continues_the_ids(pair: Pair, caller: Caller, tiny_model: TinyModel, stream: bool) -> None:
    pair.fake.replies.extend([Reply(SPLIT), Reply(SPLIT)])
    first = caller.post(stream=stream)
    assert first.status_code == 200, first.text
    [turn] = caller.turns()
    assert turn["completion_ids"] == list(SPLIT)
    before = [*turn["appended_ids"], *SPLIT]
    second = caller.post(caller.form.more(caller.first, before), stream=stream)
    appended = appended_after(tiny_model, before, [user("more")]) if caller.form.text else _NEW
    assert _sent(pair.fake) == [*before, *appended]
    assert second.headers["x-prompt-source"] == ("extended" if caller.form.text else "given")
    assert not stream or _last_event(second.content).startswith(caller.form.ended)
    url = f"/v1/sessions/{caller.headers['x-session-id']}/samples"
    [sample] = caller.client.get(url).json()["samples"]
    assert [*sample["prompt_ids"], *sample["completion_ids"]] == [*before, *appended, *SPLIT]
    assert sample["loss_mask"] == [*[1] * len(SPLIT), *[0] * len(appended), *[1] * len(SPLIT)]
    assert [value is None for value in sample["logprobs"]] == [not kept for kept in sample["loss_mask"]]


@every_format
def test_the_first_event_arrives_while_the_engine_is_at_work(pair: Pair, caller: Caller) -> None:
    pair.fake.replies.append(Reply(SPLIT, hold_at=2))
    sent = {**caller.first, "stream": True}
    with caller.client.stream("POST", caller.form.path, json=sent) as answer:
        chunks = answer.iter_raw()
        assert next(chunks).startswith((b"data: {", b"event: "))
        assert pair.fake.running == 1
        pair.fake.release()
        content = b"".join(chunks)
    assert _last_event(content).startswith(caller.form.ended)
    assert pair.fake.aborted == 0


@pytest.mark.usefixtures("resume_off")
@pytest.mark.parametrize("how", ["close", "reset", "inside"])
@every_format
def test_a_stream_that_breaks_ends_with_an_error_and_is_recorded(
    pair: Pair, caller: Caller, how: Any
) -> None:
    pair.fake.replies.append(Reply(SPLIT, break_at=3, how=how))
    content = caller.post(stream=True).content
    assert _last_event(content).startswith(caller.form.failed)
    assert caller.form.ended not in content
    wait_until(caller.turns)
    [turn] = caller.turns()
    assert turn["finish_reason"] == "abort"
    assert turn["completion_ids"] == list(SPLIT[: len(turn["completion_ids"])]) != []


@every_format
def test_a_client_that_leaves_has_what_was_sampled_recorded(pair: Pair, caller: Caller) -> None:
    pair.fake.replies.append(Reply(SPLIT, hold_at=3))
    sent = {**caller.first, "stream": True}
    with caller.client.stream("POST", caller.form.path, json=sent, headers=caller.headers):
        wait_until(lambda: pair.fake.held)
    wait_until(caller.turns)
    [turn] = caller.turns()
    assert turn["finish_reason"] == "abort"
    assert turn["completion_ids"] == list(SPLIT[: len(turn["completion_ids"])])
    wait_until(lambda: pair.fake.aborted == 1)


@pytest.mark.parametrize(
    ("stream", "how"), [(True, "close"), (False, "reset"), (False, "head"), (False, "inside")]
)
@each_format
def test_an_answer_that_breaks_before_it_is_sent(pair: Pair, caller: Caller, stream: bool, how: Any) -> None:
    """Where no head had come it is sent once more, since nothing of it had reached the client."""
    pair.fake.replies.extend([Reply(break_at=0, how=how)] * 2)
    answer = caller.post(stream=stream)
    assert answer.status_code == 502
    assert _message(caller.form, answer)


@every_way
@pytest.mark.parametrize("status", [400, 429])
@each_format
def test_the_engines_refusal_is_passed_on(pair: Pair, caller: Caller, status: int, stream: bool) -> None:
    body = error_body("not like this", "SomeError", None, status)
    pair.fake.replies.extend([Reply(error=Canned(body, status, {"content-type": "application/json"}))] * 2)
    answer = caller.post(stream=stream)
    assert (answer.status_code, _message(caller.form, answer)) == (status, "not like this")
    assert caller.turns() == []


@pytest.mark.usefixtures("resume_off")
@every_way
@pytest.mark.parametrize("finish", ["abort", "error"])
@each_format
def test_a_turn_that_the_engine_did_not_end_runs_anew_in_a_retry(
    pair: Pair, caller: Caller, finish: str, stream: bool
) -> None:
    """As for a change of weights. A client of a translated format would take it for the whole answer."""
    pair.fake.replies.extend([Reply(SPLIT[:2], finish=finish), Reply(SPLIT)])
    key = secrets.token_hex(8)
    first = caller.post(stream=stream, idempotency_key=key)
    if caller.form.translated:
        assert first.status_code == (200 if stream else 502)
        assert caller.form.ended not in first.content
    else:
        assert finish in first.text
    second = caller.post(stream=stream, idempotency_key=key)
    assert (second.status_code, "x-request-replayed" in second.headers) == (200, False)
    assert [turn["finish_reason"] for turn in caller.turns()] == [finish, "stop"]


@every_way
@each_format
def test_a_retry_is_answered_once(pair: Pair, caller: Caller, stream: bool) -> None:
    key = secrets.token_hex(8)
    first, second = (caller.post(stream=stream, idempotency_key=key) for _ in range(2))
    assert second.headers["x-request-replayed"] == "true" and "x-request-replayed" not in first.headers
    assert (second.status_code, second.content) == (200, first.content)
    for name in ("x-turn-id", "x-session-id", "x-prompt-source", "content-type"):
        assert second.headers[name] == first.headers[name]
    assert len(caller.turns()) == 1


@each_format
def test_fields_of_the_session_have_their_chat_names(pair: Pair, caller: Caller) -> None:
    fields = {"overrides": {"max_tokens": 7}, "defaults": {"temperature": 0.5, "top_p": 0.1}}
    caller.client.post("/v1/sessions", json={"id": caller.headers["x-session-id"], **fields})
    asked: Body = {"top_p": 0.9}
    if caller.form.name == "generate":
        asked = {"sampling_params": asked}
    assert caller.post({**caller.first, **asked}).status_code == 200
    [generated] = pair.fake.generations()
    sampling = generated.json.get("sampling_params", generated.json)
    assert sampling.items() >= {"max_tokens": 7, "temperature": 0.5, "top_p": 0.9}.items()


@every_way
@each_format
def test_a_session_at_its_limit_is_answered_without_an_engine(
    pair: Pair, caller: Caller, stream: bool
) -> None:
    limited = {"id": caller.headers["x-session-id"], "limits": {"turns": 1}}
    caller.client.post("/v1/sessions", json=limited)
    evidence: Body = {"return_token_ids": True, "logprobs": 1 if caller.form.name == "completions" else True}
    asked = {**caller.first, **({} if caller.form.translated else evidence)}
    first, last = (caller.post(asked, stream=stream) for _ in range(2))
    assert (first.status_code, last.status_code, last.headers["x-session-limit"]) == (200, 200, "turns")
    assert last.headers["content-type"].split(";")[0] == first.headers["content-type"].split(";")[0]
    assert "x-session-limit" not in first.headers and "x-turn-id" not in last.headers
    assert last.headers["x-session-id"] == first.headers["x-session-id"]
    if stream:
        assert _last_event(last.content).startswith(caller.form.ended)
    elif not caller.form.translated:
        [choice] = last.json()["choices"]
        assert choice.keys() <= first.json()["choices"][0].keys()
        assert (choice["token_ids"], choice["finish_reason"]) == ([], "stop")
    assert (len(caller.turns()), len(pair.fake.generations())) == (1, 1)


@each_format
def test_a_policy_is_enforced_or_noted(pair: Pair, caller: Caller) -> None:
    asked: Body = {"temperature": 0.5, "top_p": 0.9}
    if caller.form.name == "generate":
        asked = {"sampling_params": asked}
    for mode, top_p, noted in (("enforce", 0.25, []), ("note", 0.9, ["top_p"])):
        made = _caller(pair.client, caller.form)
        policy = {"mode": mode, "temperature": 0.5, "top_p": 0.25}
        pair.client.post("/v1/sessions", json={"id": made.headers["x-session-id"], "policy": policy})
        assert made.post({**made.first, **asked}).status_code == 200
        sent = pair.fake.generations()[-1].json
        assert sent.get("sampling_params", sent)["top_p"] == top_p
        assert [turn["off_policy"] for turn in made.turns()] == [noted]


@each_format
def test_turns_of_a_finished_session_are_marked_and_counted(pair: Pair, caller: Caller) -> None:
    """Each request begins a conversation: those of a second run are told from those of the first."""
    session = f"/v1/sessions/{caller.headers['x-session-id']}"
    before = Scrape(pair.client)
    for route, body in (("end", {}), ("reward", {"reward": 1.0}), ("reward", {"reward": 0.5})):
        assert caller.post().status_code == 200
        assert pair.client.post(f"{session}/{route}", json=body).is_success
    assert [turn["after_finish"] for turn in caller.turns()] == [False, True, True]
    samples = pair.client.get(f"{session}/samples").json()["samples"]
    assert [[turn["after_finish"] for turn in each["turns"]] for each in samples] == [[False], [True], [True]]
    assert [sample["turns_after_finish"] for sample in samples] == [0, 1, 1]
    assert grown(before, Scrape(pair.client), "turns_after_finish_total") == 2


@each_format
def test_bodies_that_are_no_json_object(pair: Pair, caller: Caller) -> None:
    for body in (b"", b"[1]", b"\xff", b"[" * 5000):
        answer = caller.client.post(caller.form.path, content=body)
        assert answer.status_code == 400
        assert _message(caller.form, answer)
    assert pair.fake.generations() == []


@each_format
def test_a_model_that_is_not_served(pair: Pair, caller: Caller) -> None:
    answer = caller.post({**caller.first, "model": "nobody"})
    assert answer.status_code == 404
    assert "nobody" in _message(caller.form, answer)


@pytest.fixture(scope="module")
def keyed(tiny_model: TinyModel) -> Iterator[Pair]:
    """A proxy that knows two keys."""
    settings: Any = {"store": "memory:", "api_key": ["one", "two"]}
    with FakeVllm(tiny_model, Variant.SCALE_OUT) as engine, run_proxy([engine], **settings) as client:
        yield Pair(engine, client)


@pytest.mark.parametrize("form", _FORMATS.values(), ids=_FORMATS)
def test_nothing_of_a_tenant_reaches_another(keyed: Pair, form: Format) -> None:
    """Equal sessions, keys of retries and requests: each has turns of its own."""
    one = _caller(keyed.client, form)
    refused = one.post()
    assert (refused.status_code, bool(_message(form, refused))) == (401, True)
    two = Caller(keyed.client, form, {**one.headers, "authorization": "Bearer two"}, one.first)
    one.headers["authorization"] = "Bearer one"
    key = secrets.token_hex(8)
    keyed.fake.replies.extend([Reply(SPLIT)] * 2)
    first, second = (each.post(idempotency_key=key) for each in (one, two))
    assert "x-request-replayed" not in second.headers
    [own], [other] = one.turns(), two.turns()
    assert (own["id"], other["id"]) == (first.headers["x-turn-id"], second.headers["x-turn-id"])
    assert own["id"] != other["id"] and other["parent"] is None
    two.client.delete(f"/v1/sessions/{two.headers['x-session-id']}", headers=two.headers)
    sent = form.more(one.first, [*own["appended_ids"], *own["completion_ids"]])
    for each, parent in ((two, None), (one, own["id"])):
        each.post(sent)
        assert each.turns()[-1]["parent"] == parent


def test_no_engine(tiny_model: TinyModel) -> None:
    with FakeVllm(tiny_model) as engine, run_proxy([engine], store="memory:") as client:
        engine.kill()
        wait_until(lambda: client.get("/ready").status_code == 503)
        for form in _FORMATS.values():
            answer = _caller(client, form).post()
            assert answer.status_code == 503 and answer.headers["retry-after"].isdigit()
            assert _message(form, answer)


def test_an_engine_that_takes_no_ids(tiny_model: TinyModel) -> None:
    """Turns are rendered; only a request that brings ids is refused."""
    with FakeVllm(tiny_model, Variant.NEITHER) as engine, run_proxy([engine], store="memory:") as client:
        for name in ("chat", "tokens", "messages", "responses"):
            caller = _caller(client, _FORMATS[name])
            engine.replies.append(Reply(SPLIT))
            assert caller.post().status_code == 200
            answer = caller.post(caller.form.more(caller.first, [5, 6]))
            if name == "tokens":
                assert (answer.status_code, answer.json()["error"]["code"]) == (501, "no_token_in")
                assert "--enable-scale-out" in answer.json()["error"]["message"]
            else:
                assert answer.headers["x-prompt-reason"] == "no_token_in"
