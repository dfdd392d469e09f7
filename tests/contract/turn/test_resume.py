"""A turn whose engine breaks off goes on from the ids sampled so far: one answer, one recorded turn."""

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from tests.support.fake_vllm import Canned, FakeVllm, Reply, Variant, data_of, script
from tests.support.scraping import Scrape
from tests.support.talk import CHAT, GENERATE, user
from tests.support.tiny_model import SPLIT, TinyModel
from tests.support.utils import run_proxy, wait_until
from tokenproxy.store.sqlite import SqliteStore

_EVIDENCE = {"return_token_ids": True, "logprobs": True, "stream_options": {"include_usage": True}}
_JSON = {"content-type": "application/json"}
_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_BOTH = pytest.mark.parametrize("variant", [Variant.CHAT, Variant.SCALE_OUT], ids=str)


@dataclass
class Two:
    """Two engines, and a client of the proxy before them."""

    engines: list[FakeVllm]
    client: httpx.Client

    def script(self, *replies: Reply) -> None:
        """See `script`."""
        script(self.engines, *replies)

    def generated(self) -> list[tuple[list[int], Any]]:
        """The prompts of ids that the engines got, and the numbers of ids that they may sample after them."""
        found: list[tuple[Any, Any]] = []
        for engine in self.engines:
            for seen in engine.generations(CHAT, GENERATE):
                body = seen.json
                ids = body.get("token_ids") or (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
                found.append((ids, body.get("sampling_params", body).get("max_tokens")))
        return sorted((each for each in found if each[0]), key=lambda each: len(each[0]))


@contextmanager
def _two(model: TinyModel, variant: Variant, store: str = "memory:", **settings: Any) -> Iterator[Two]:
    with (
        FakeVllm(model, variant) as one,
        FakeVllm(model, variant) as other,
        run_proxy([one, other], store=store, **settings) as client,
    ):
        yield Two([one, other], client)


def _turn(client: httpx.Client, session: str) -> dict[str, Any]:
    [sample] = client.get(f"/v1/sessions/{session}/samples").json()["samples"]
    [turn] = sample["turns"]
    return {**turn, "ids": sample["completion_ids"], "prompt": sample["prompt_ids"]}


def _breaks(client: httpx.Client) -> dict[tuple[str, str], int]:
    """Breaks of turns by their reason and their result."""
    pattern = r'broken_turns_total\{reason="(\w+)",result="(\w+)"\} (\d+)'
    return {(why, result): int(n) for why, result, n in re.findall(pattern, client.get("/metrics").text)}


@_BOTH
@pytest.mark.parametrize("how", ["reset", "close"])
def test_a_stream_goes_on_elsewhere(tiny_model: TinyModel, variant: Variant, how: Any) -> None:
    with _two(tiny_model, variant) as two:
        two.script(Reply(ids=SPLIT, break_at=3, how=how), Reply(ids=SPLIT[2:]))
        body = {"messages": [user("Hi")], "stream": True, "max_tokens": 50, "min_tokens": 3, **_EVIDENCE}
        answer = two.client.post(CHAT, json=body, headers={"x-session-id": "s"})
        chunks = list(data_of(answer.content))
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert [id for choice in choices for id in choice.get("token_ids") or ()] == list(SPLIT)
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        assert text.removesuffix("<|im_end|>") == "hello"
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert chunks[-1]["usage"]["completion_tokens"] == len(SPLIT)
        [prompt] = [chunk["prompt_token_ids"] for chunk in chunks if chunk.get("prompt_token_ids")]
        assert chunks[-1]["usage"]["prompt_tokens"] == len(prompt)
        assert two.generated()[-1] == ([*prompt, *SPLIT[:2]], 48)
        turn = _turn(two.client, "s")
        assert (turn["ids"], turn["prompt"], turn["finish_reason"]) == (list(SPLIT), prompt, "stop")
        assert not turn.get("problem")
        assert [(each["start"], each["end"]) for each in turn["segments"]] == [(0, 2), (2, len(SPLIT))]
        assert _breaks(two.client) == {("broken", "resumed"): 1}


@_BOTH
def test_an_abort_goes_on_only_where_that_is_set(tiny_model: TinyModel, variant: Variant) -> None:
    for policy, goes_on in (("all", True), ("failures", False)):
        with _two(tiny_model, variant, resume=policy) as two:
            for stream in (False, True):
                two.script(Reply(ids=SPLIT[:3], finish="abort"), Reply(ids=SPLIT[3:]))
                body = {"messages": [user("Hi")], "stream": stream}
                answer = two.client.post(CHAT, json=body, headers={"x-session-id": f"s{stream}"})
                assert answer.status_code == 200
                turn = _turn(two.client, f"s{stream}")
                expected = list(SPLIT) if goes_on else list(SPLIT[:3])
                assert (turn["ids"], turn["finish_reason"]) == (expected, "stop" if goes_on else "abort")


@pytest.mark.parametrize("reported_by", [3, 1], ids=["the end", "each piece"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_of_two_engines_has_no_experts(tiny_model: TinyModel, stream: bool, reported_by: int) -> None:
    """Each engine reports its own, vLLM with the end; what the first one reported is not that of the turn."""

    def experts_of(ids: list[int]) -> str | None:
        return None if stream and SPLIT[reported_by - 1] not in ids else "AAAA"

    with _two(tiny_model, Variant.CHAT, resume="all") as two:
        two.script(Reply(ids=SPLIT[:3], finish="abort"), Reply(ids=SPLIT[3:]))
        for engine in two.engines:
            engine.facts = {("routed_experts", "return_token_ids"): experts_of}
        body = {"messages": [user("Hi")], "stream": stream, **_EVIDENCE}
        answer = two.client.post(CHAT, json=body, headers={"x-session-id": "s"})
        assert reported_by == 1 or "AAAA" not in answer.text
        turn = _turn(two.client, "s")
        assert (turn["ids"], turn["routed_experts"], len(turn["segments"])) == (list(SPLIT), None, 2)


def test_an_abort_before_the_first_id(tiny_model: TinyModel) -> None:
    """vLLM's stream then has a role, the usage and an end, and no finish reason."""
    with _two(tiny_model, Variant.CHAT, resume="all") as two:
        two.script(Reply(ids=()), Reply(ids=()), Reply(ids=SPLIT))
        body = {"messages": [user("Hi")], "stream": True, **_EVIDENCE}
        answer = two.client.post(CHAT, json=body, headers={"x-session-id": "s"})
        assert [
            chunk["usage"]["completion_tokens"] for chunk in data_of(answer.content) if chunk.get("usage")
        ] == [len(SPLIT)]
        turn = _turn(two.client, "s")
        assert (turn["ids"], turn["finish_reason"]) == (list(SPLIT), "stop")


def test_an_abort_that_somebody_asked_for_stays_one(tiny_model: TinyModel) -> None:
    with _two(tiny_model, Variant.CHAT, resume="all") as two:
        for engine in two.engines:
            engine.canned["/abort_requests"] = Canned(b'{"aborted": 1}', 200, _JSON)
        two.script(Reply(ids=SPLIT[:3], finish="abort", hold_at=2))
        body = {"messages": [user("Hi")], "stream": True}
        with two.client.stream("POST", CHAT, json=body, headers={"x-session-id": "s"}) as answer:
            wait_until(lambda: sum(engine.held for engine in two.engines))
            assert two.client.post("/abort_requests", json={"abort_all": True}).status_code == 200
            for engine in two.engines:
                engine.release()
            chunks = list(data_of(answer.read()))
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "abort"
        turn = _turn(two.client, "s")
        assert (turn["ids"], turn["finish_reason"], turn["segments"]) == (list(SPLIT[:3]), "abort", [])


@_BOTH
def test_each_choice_goes_on(tiny_model: TinyModel, variant: Variant) -> None:
    """The second has ended when the engine breaks off, or both are cut."""
    for ended in (True, False):
        with _two(tiny_model, variant) as two:
            other = Reply(ids=SPLIT[-2:]) if ended else Reply(ids=SPLIT)
            rests = [Reply(ids=SPLIT[2:])] if ended else [Reply(ids=SPLIT[2:]), Reply(ids=SPLIT[2:])]
            # events: the roles, and then one for each choice and position
            two.script(Reply(ids=SPLIT, others=(other,), break_at=5), *rests)
            body = {"messages": [user("Hi")], "stream": True, "n": 2, **_EVIDENCE}
            answer = two.client.post(CHAT, json=body, headers={"x-session-id": "s"})
            chunks = list(data_of(answer.content))
            ids: dict[int, list[int]] = {0: [], 1: []}
            for choice in (choice for chunk in chunks for choice in chunk["choices"]):
                ids[choice["index"]] += choice.get("token_ids") or []
            assert ids == {0: list(SPLIT), 1: list(other.ids)}, (ended, answer.text)
            assert chunks[-1]["usage"]["completion_tokens"] == len(SPLIT) + len(other.ids)
            samples = two.client.get("/v1/sessions/s/samples").json()["samples"]
            assert sorted(sample["completion_ids"] for sample in samples) == sorted(ids.values())
            assert not [turn for sample in samples for turn in sample["turns"] if turn.get("problem")]


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"stop": ["x"]},
        {"tools": [_TOOL], "tool_choice": "required"},
    ],
    ids=str,
)
def test_what_cannot_go_on_is_sampled_anew_or_ends_with_an_error(
    tiny_model: TinyModel, fields: dict[str, Any]
) -> None:
    with _two(tiny_model, Variant.CHAT, resume="all") as two:
        body = {"messages": [user("Hi")], **fields}
        two.script(Reply(ids=SPLIT[:3], finish="abort"), Reply(ids=SPLIT))
        assert two.client.post(CHAT, json=body, headers={"x-session-id": "s"}).status_code == 200
        turn = _turn(two.client, "s")
        assert (turn["ids"], turn["finish_reason"]) == (list(SPLIT), "stop")
        assert [(each["start"], each["end"], each["ended"]) for each in turn["segments"]] == [
            (0, 0, "abort"),
            (0, len(SPLIT), ""),
        ]
        two.script(Reply(ids=SPLIT, break_at=3))
        *_, last = data_of(two.client.post(CHAT, json={**body, "stream": True}).content)
        assert last["error"]["code"] == 502


@_BOTH
def test_text_that_the_next_engine_reads_differently_does_not_go_on(
    tiny_model: TinyModel, variant: Variant
) -> None:
    """For example half of a character, or a call whose beginning the first engine held back."""
    with _two(tiny_model, variant) as two:
        deltas = ({"content": "h"}, {"content": ""}, {"content": "ll"})
        two.script(Reply(ids=SPLIT[:3], deltas=deltas, break_at=3), Reply(ids=SPLIT[2:]))
        if variant is Variant.SCALE_OUT:
            for engine in two.engines:
                engine.usual = Reply(message={"content": "?"})
        *_, last = data_of(two.client.post(CHAT, json={"messages": [user("Hi")], "stream": True}).content)
        assert last["error"]["code"] == 502
        assert "in another way" in last["error"]["message"]


def test_an_engine_that_starts_again_goes_on(tiny_model: TinyModel) -> None:
    with FakeVllm(tiny_model) as engine, run_proxy([engine], store="memory:") as client:
        engine.replies.append(Reply(ids=SPLIT, hold_at=3))
        engine.usual = Reply(ids=SPLIT[2:])
        body = {"messages": [user("Hi")], "stream": True}
        with client.stream("POST", CHAT, json=body, headers={"x-session-id": "s"}) as answer:
            wait_until(lambda: engine.held)
            engine.kill()
            engine.start()
            chunks = list(data_of(answer.read()))
        assert not [chunk for chunk in chunks if "error" in chunk]
        assert _turn(client, "s")["ids"] == list(SPLIT)


@_BOTH
def test_a_stream_goes_on_whose_engine_reports_that_it_died(tiny_model: TinyModel, variant: Variant) -> None:
    with _two(tiny_model, variant) as two:
        two.script(Reply(ids=SPLIT, error_at=3), Reply(ids=SPLIT[2:]))
        body = {"messages": [user("Hi")], "stream": True}
        answer = two.client.post(CHAT, json=body, headers={"x-session-id": "s"})
        assert b"error" not in answer.content
        turn = _turn(two.client, "s")
        assert (turn["ids"], [each["ended"] for each in turn["segments"]]) == (list(SPLIT), ["error", ""])


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_every_format_goes_on(tiny_model: TinyModel, path: str) -> None:
    with _two(tiny_model, Variant.CHAT) as two:
        two.script(Reply(ids=SPLIT, break_at=3), Reply(ids=SPLIT[2:]))
        body: dict[str, Any] = {"model": "tiny", "max_tokens": 50, "stream": True}
        body |= {"input": "Hi"} if path.endswith("responses") else {"messages": [user("Hi")]}
        answer = two.client.post(path, json=body, headers={"x-session-id": "s"})
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        deltas = [event.get("delta") for event in events]
        texts = [each.get("text", "") if isinstance(each, dict) else each or "" for each in deltas]
        assert "".join(texts) == "hello", answer.text
        assert events[-1]["type"] in ("message_stop", "response.completed")
        assert _turn(two.client, "s")["ids"] == list(SPLIT)


def test_a_break_after_the_beginning_of_a_call(tiny_model: TinyModel) -> None:
    """The next engine parses the ids before the break too, and finds the same beginning."""
    function = {"name": "f", "arguments": '{"a'}
    begun = {
        "content": None,
        "tool_calls": [{"index": 0, "id": "1", "type": "function", "function": function}],
    }
    with _two(tiny_model, Variant.SCALE_OUT) as two:
        for parsed, goes_on in ((begun, True), ({"content": "?"}, False)):
            for engine in two.engines:
                engine.usual = Reply(message=parsed)  # what derender makes of ids without a script
            two.script(Reply(ids=SPLIT, message=begun, break_at=2), Reply(ids=SPLIT[1:]))
            body = {
                "messages": [user(f"Hi {goes_on}")],
                "tools": [_TOOL],
                "stream": True,
                "return_token_ids": True,
            }
            chunks = list(data_of(two.client.post(CHAT, json=body).content))
            ids = [
                id
                for chunk in chunks
                for each in chunk.get("choices", ())
                for id in each.get("token_ids") or ()
            ]
            assert (ids, "error" in chunks[-1]) == (list(SPLIT if goes_on else SPLIT[:1]), not goes_on)


_PIECES = ('{"a', '": "x', "\\u00", 'e9"}')
_BEGUN = {"index": 0, "id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}
_CALL: tuple[dict[str, Any], ...] = (
    {"tool_calls": [_BEGUN]},
    *({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in _PIECES),
    {"content": ""},
)


def _arguments(path: str, answer: httpx.Response) -> str:
    """The arguments of the calls that a stream has, in any format."""
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    if path == CHAT:
        deltas = [choice["delta"] for event in events for choice in event.get("choices", ())]
        calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
        return "".join(call["function"].get("arguments") or "" for call in calls)
    if path == "/v1/messages":
        return "".join(event["delta"].get("partial_json", "") for event in events if "delta" in event)
    kind = "response.function_call_arguments.delta"
    return "".join(event["delta"] for event in events if event["type"] == kind)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("deaths", [1, 2])
def test_a_break_in_the_middle_of_the_json_of_a_call(tiny_model: TinyModel, path: str, deaths: int) -> None:
    """Of one engine, and of the next one too: wherever that is, the call comes whole and once."""
    with _two(tiny_model, Variant.SCALE_OUT) as two:
        for engine in two.engines:
            engine.usual = Reply(deltas=_CALL, ids=SPLIT)  # what derender makes of ids without a script
        for sampled in range(1, len(SPLIT)):
            first = Reply(ids=SPLIT, deltas=_CALL, break_at=sampled + 1, how="reset", finish="tool_calls")
            rests = [Reply(ids=SPLIT[sampled:], deltas=_CALL)]
            if deaths == 2:
                more = min(sampled + 1, len(SPLIT) - 1)
                broken = Reply(ids=SPLIT[sampled:], deltas=_CALL, break_at=more - sampled)
                rests = [broken, Reply(ids=SPLIT[more:], deltas=_CALL)]
            two.script(first, *rests)
            body: dict[str, Any] = {"model": "tiny", "max_tokens": 50, "stream": True}
            if path == "/v1/responses":
                tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
                body |= {"input": f"Hi {sampled}", "tools": [tool], "max_output_tokens": 50}
                del body["max_tokens"]
            elif path == "/v1/messages":
                tool = {"name": "f", "input_schema": {"type": "object"}}
                body |= {"messages": [user(f"Hi {sampled}")], "tools": [tool]}
            else:
                body |= {"messages": [user(f"Hi {sampled}")], "tools": [_TOOL]}
            answer = two.client.post(path, json=body, headers={"x-session-id": f"s{sampled}"})
            assert json.loads(_arguments(path, answer)) == {"a": "x\u00e9"}, (sampled, answer.text)
            assert '"error":{' not in answer.text
            turn = _turn(two.client, f"s{sampled}")
            assert (turn["ids"], turn["finish_reason"]) == (list(SPLIT), "tool_calls"), sampled
            assert not turn.get("problem")


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_call_that_is_cut_where_no_engine_parses_ids(tiny_model: TinyModel, deaths: int) -> None:
    """The client learns that it is cut, what was sampled is recorded, and the next attempt is served."""
    with _two(tiny_model, Variant.CHAT) as two:
        for sampled in range(1, len(SPLIT)):
            body = {"messages": [user(f"Hi {sampled}")], "tools": [_TOOL], "stream": True, "max_tokens": 50}
            cut = Reply(ids=SPLIT, deltas=_CALL, break_at=sampled + 1, how="reset", finish="tool_calls")
            two.script(*[cut] * deaths, Reply(ids=SPLIT, deltas=_CALL, finish="tool_calls"))
            for _ in range(deaths):
                answer = two.client.post(CHAT, json=body, headers={"x-session-id": f"s{sampled}"})
                *_, last = data_of(answer.content)
                assert last["error"]["code"] == 502, (sampled, answer.text)
                assert '"finish_reason":"' not in answer.text
            answer = two.client.post(CHAT, json=body, headers={"x-session-id": f"s{sampled}"})
            assert json.loads(_arguments(CHAT, answer)) == {"a": "x\u00e9"}
            session = two.client.get(f"/v1/sessions/s{sampled}?ids=true").json()
            ids = [turn["completion_ids"] for turn in session["turns"]]
            assert ids == [*[list(SPLIT[:sampled])] * deaths, list(SPLIT)]


def test_a_break_after_the_last_id(tiny_model: TinyModel) -> None:
    with _two(tiny_model, Variant.CHAT) as two:
        two.script(Reply(ids=(*SPLIT[:5], 74), break_at=6))
        body = {"messages": [user("Hi")], "stream": True, "max_tokens": 5}
        answer = two.client.post(CHAT, json=body, headers={"x-session-id": "s"})
        assert list(data_of(answer.content))[-1]["choices"][0]["finish_reason"] == "length"
        turn = _turn(two.client, "s")
        assert (turn["ids"], turn["finish_reason"], turn.get("problem")) == (list(SPLIT[:5]), "length", None)


def test_a_break_at_the_end_of_the_context(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The context is full: the turn ends, although the request allows more ids."""
    most = len(tiny_model.render([user("Hi")])) + 5
    monkeypatch.setattr(FakeVllm, "max_model_len", most)
    for fields in ({}, {"max_tokens": 50}):
        with _two(tiny_model, Variant.CHAT) as two:
            two.script(Reply(ids=(*SPLIT[:5], 74), break_at=6), Reply())
            body = {"messages": [user("Hi")], "stream": True, **fields}
            answer = two.client.post(CHAT, json=body, headers={"x-session-id": "s"})
            assert list(data_of(answer.content))[-1]["choices"][0]["finish_reason"] == "length"
            turn = _turn(two.client, "s")
            assert (turn["ids"], turn["finish_reason"]) == (list(SPLIT[:5]), "length")


@_BOTH
@pytest.mark.parametrize("how", ["error", "reset", "close"])
def test_a_break_behind_the_finish(tiny_model: TinyModel, variant: Variant, how: Any) -> None:
    """Only the usage and the end are missing."""
    with _two(tiny_model, variant) as two:
        at = len(SPLIT) + 1
        two.script(Reply(ids=SPLIT, **({"error_at": at} if how == "error" else {"break_at": at, "how": how})))
        body = {"messages": [user("Hi")], "stream": True, **_EVIDENCE}
        answer = two.client.post(CHAT, json=body, headers={"x-session-id": "s"})
        assert answer.content.endswith(b"data: [DONE]\n\n") and b'"error"' not in answer.content
        assert list(data_of(answer.content))[-1]["usage"]["completion_tokens"] == len(SPLIT)
        assert _turn(two.client, "s")["segments"] == []


def test_a_next_engine_that_ends_too_early(tiny_model: TinyModel) -> None:
    """Its stream ends in order, and without a finish reason: that is one more break."""
    with _two(tiny_model, Variant.CHAT) as two:
        two.script(Reply(ids=SPLIT, break_at=3), Reply(ids=SPLIT[2:], done_at=2), Reply(ids=SPLIT[3:]))
        body = {"messages": [user("Hi")], "stream": True}
        answer = two.client.post(CHAT, json=body, headers={"x-session-id": "s"})
        assert b'"finish_reason":"stop"' in answer.content
        turn = _turn(two.client, "s")
        assert (turn["ids"], len(turn["segments"])) == (list(SPLIT), 3)


def test_a_turn_is_not_sampled_anew_without_end(tiny_model: TinyModel) -> None:
    """Reasoning cannot go on here, and each update comes before the turn has ended."""
    with _two(tiny_model, Variant.CHAT, resume="all") as two:
        message = {"content": None, "reasoning": "hm"}
        two.script(*[Reply(ids=SPLIT[: 2 + n % 3], finish="abort", message=message) for n in range(20)])
        answer = two.client.post(CHAT, json={"messages": [user("Hi")]}, headers={"x-session-id": "s"})
        assert answer.json()["choices"][0]["finish_reason"] == "abort"
        dropped = [each for each in _turn(two.client, "s")["segments"] if each["end"] == 0]
        assert len(dropped) == 5


def test_a_store_that_stalls_for_a_moment_ends_no_turn(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read of whether an abort was asked for waits as long for the store as another request."""
    stalls, works, get, reads = Event(), Event(), SqliteStore.get, list[str]()

    async def slow(self: SqliteStore, space: str, *args: Any, **options: Any) -> Any:
        if space.endswith("/weights") and stalls.is_set() and not works.is_set():
            reads.append(space)
            await asyncio.to_thread(works.wait)
        return await get(self, space, *args, **options)

    monkeypatch.setattr(SqliteStore, "get", slow)
    store = f"sqlite://{tmp_path}/turns.db"
    with _two(tiny_model, Variant.CHAT, store, resume="all", store_timeout_s=0.2) as two:
        two.script(Reply(ids=SPLIT[:3], finish="abort", hold_at=2), Reply(ids=SPLIT[3:]))
        body = {"messages": [user("Hi")], "stream": True}
        with two.client.stream("POST", CHAT, json=body, headers={"x-session-id": "s"}) as answer:
            wait_until(lambda: sum(engine.held for engine in two.engines))
            stalls.set()
            for engine in two.engines:
                engine.release()
            wait_until(lambda: len(reads) >= 3)
            works.set()
            answer.read()
        assert _turn(two.client, "s")["ids"] == list(SPLIT)


def test_an_aborted_turn_that_is_not_recorded_is_sampled_anew(tiny_model: TinyModel) -> None:
    with _two(tiny_model, Variant.CHAT, resume="all") as two:
        two.script(Reply(ids=SPLIT[:3], finish="abort"), Reply(ids=SPLIT))
        answer = two.client.post(f"{CHAT}/tokens", json={"prompt_ids": [1, 5, 9], "max_tokens": 50})
        assert "x-turn-id" not in answer.headers
        [choice] = answer.json()["choices"]
        assert (choice["token_ids"], choice["finish_reason"]) == (list(SPLIT), "stop")


def test_a_stream_with_an_image_does_not_go_on(tiny_model: TinyModel) -> None:
    """The next engine would get the ids of the image, and no image."""
    with _two(tiny_model, Variant.CHAT) as two:
        two.script(Reply(ids=SPLIT, break_at=3), Reply(ids=SPLIT[2:]))
        messages = [{"role": "user", "content": [_IMAGE]}]
        *_, last = data_of(two.client.post(CHAT, json={"messages": messages, "stream": True}).content)
        assert last["error"]["code"] == 502 and not two.generated()


def test_a_rest_that_begins_with_a_call_may_be_text(tiny_model: TinyModel) -> None:
    """The engine parsed it alone. After text, some parsers find no call."""
    function = {"name": "f", "arguments": "{}"}
    call = {"content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    with _two(tiny_model, Variant.CHAT, resume="all") as two:
        body = {"messages": [user("Hi")], "tools": [_TOOL]}
        two.script(Reply(ids=SPLIT, break_at=3), Reply(ids=SPLIT[2:], message=call, finish="tool_calls"))
        *_, last = data_of(two.client.post(CHAT, json={**body, "stream": True}).content)
        assert "as a call" in last["error"]["message"]
        two.script(Reply(ids=SPLIT[:3], finish="abort"), Reply(ids=SPLIT))
        answer = two.client.post(CHAT, json=body, headers={"x-session-id": "s"})
        assert answer.json()["choices"][0]["message"]["content"] == "hello"
        assert _turn(two.client, "s")["segments"][0]["end"] == 0, "sampled anew"


def test_a_whole_response_says_nothing_twice(tiny_model: TinyModel) -> None:
    with _two(tiny_model, Variant.CHAT, resume="all") as two:
        two.script(Reply(ids=SPLIT[:3], finish="abort"), Reply(ids=SPLIT[3:]))
        body = {"model": "tiny", "input": "Hi"}
        answer = two.client.post("/v1/responses", json=body, headers={"x-session-id": "s"})
        assert [part["text"] for item in answer.json()["output"] for part in item["content"]] == ["hello"]


def test_an_abort_that_is_asked_for_while_a_turn_waits(tiny_model: TinyModel) -> None:
    """An update cut the turn, and the trainer drops all requests before it resumes."""
    with _two(tiny_model, Variant.CHAT, resume="all") as two:
        for engine in two.engines:
            for path in ("/pause", "/resume", "/abort_requests"):
                engine.canned[path] = Canned(b'{"aborted": 1}', 200, _JSON)
        two.script(Reply(ids=SPLIT[:3], finish="abort", hold_at=2), Reply(ids=SPLIT[3:]))
        body = {"messages": [user("Hi")], "stream": True}
        with two.client.stream("POST", CHAT, json=body, headers={"x-session-id": "s"}) as answer:
            wait_until(lambda: sum(engine.held for engine in two.engines))
            assert two.client.post("/pause?mode=abort").status_code == 200
            for engine in two.engines:
                engine.release()
            wait_until(lambda: Scrape(two.client).value("requests_queued") == 1)
            assert two.client.post("/abort_requests", json={"abort_all": True}).status_code == 200
            assert two.client.post("/resume").status_code == 200
            answer.read()
        turn = _turn(two.client, "s")
        assert (turn["ids"], turn["finish_reason"]) == (list(SPLIT[:3]), "abort")
        assert _breaks(two.client) == {("abort", "ended"): 1}


def test_a_client_that_leaves_before_the_turn_goes_on(tiny_model: TinyModel) -> None:
    with _two(tiny_model, Variant.CHAT) as two:
        two.script(Reply(ids=SPLIT, break_at=3), Reply(ids=SPLIT[2:], hold_at=0))
        body = {"messages": [user("Hi")], "stream": True}
        with two.client.stream("POST", CHAT, json=body, headers={"x-session-id": "s"}):
            wait_until(lambda: sum(engine.held for engine in two.engines))
        wait_until(lambda: _breaks(two.client))
        assert sum(_breaks(two.client).values()) == 1
        assert {result for _, result in _breaks(two.client)} == {"ended"}
        assert _turn(two.client, "s")["ids"] == list(SPLIT[:2])


def test_a_full_replica_is_asked_again(tiny_model: TinyModel) -> None:
    with _two(tiny_model, Variant.CHAT) as two:
        full = Reply(error=Canned(b'{"error": {"message": "full"}}', 429, _JSON))
        two.script(Reply(ids=SPLIT, break_at=3), full, Reply(ids=SPLIT[2:]))
        body = {"messages": [user("Hi")], "stream": True}
        assert b"error" not in two.client.post(CHAT, json=body, headers={"x-session-id": "s"}).content
        assert _turn(two.client, "s")["ids"] == list(SPLIT)


def test_a_broken_response_does_not_count_as_running(tiny_model: TinyModel) -> None:
    """Else a turn of a full replica waits for itself."""
    with (
        FakeVllm(tiny_model) as engine,
        run_proxy([engine], store="memory:", replica_requests=1) as client,
    ):
        engine.replies += [Reply(ids=SPLIT, break_at=3, how="reset"), Reply(ids=SPLIT[2:])]
        body = {"messages": [user("Hi")], "stream": True}
        assert b"error" not in client.post(CHAT, json=body, headers={"x-session-id": "s"}).content
        assert _turn(client, "s")["ids"] == list(SPLIT)


@pytest.mark.parametrize("fault", ["echo", "echo of the prompt", "text without ids", "no text"])
def test_nothing_is_guessed(tiny_model: TinyModel, fault: str) -> None:
    """The next engine used other ids, the ids so far are unknown, or nothing tells what they spell."""
    with _two(tiny_model, Variant.CHAT, resume="all") as two:
        if fault == "no text":
            for engine in two.engines:
                engine.canned["/detokenize"] = Canned(b"{}", 404)
        broken = Reply(ids=SPLIT[:3], finish="abort", silent=("ids",) if fault.startswith("text") else ())
        echoes = {"echo": (1, 2, 3), "echo of the prompt": tuple(tiny_model.render([user("Hi")]))}
        rests = [Reply(ids=SPLIT[3:], echo=echo) for name, echo in echoes.items() if name == fault]
        two.script(broken, *rests, Reply(ids=SPLIT))
        answer = two.client.post(CHAT, json={"messages": [user("Hi")]}, headers={"x-session-id": "s"})
        assert answer.json()["choices"][0]["message"]["content"] == "hello", "sampled anew"
        turn = _turn(two.client, "s")
        assert (turn["ids"], turn["weights_uncertain"]) == (list(SPLIT), False)
        assert {(each["start"], each["end"]) for each in turn["segments"]} == {(0, 0), (0, len(SPLIT))}
