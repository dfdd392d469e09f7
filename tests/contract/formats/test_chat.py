"""Plain OpenAI conversations stay exact, however clients spell them; a turn that does not is reported."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.fake_vllm import Canned, Reply, Variant, error_body
from tests.support.talk import CHAT, Message, Talk, call, result, user
from tests.support.tiny_model import END, SPLIT
from tests.support.utils import EVERY_SPELLING, wait_until

Make = Callable[..., Talk]


@EVERY_SPELLING
@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_and_their_results(talk: Make, stream: bool) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    made = talk(fields={"tools": tools})
    one, two = call(arguments='{"a": 1, "b": "é"}'), call("g")
    calling = Reply(SPLIT, message={"content": None, "tool_calls": [one, two]}, finish="tool_calls")
    made.ask(reply=calling, stream=stream)
    assert [c["id"] for c in made.messages[-1]["tool_calls"]] == [one["id"], two["id"]]
    three = call()
    again = Reply((90, 91), message={"content": None, "tool_calls": [three]}, finish="tool_calls")
    made.follow(result(one, "1"), result(two, "two"), reply=again, stream=stream)
    made.follow(result(three, "3"), user("Go on"), stream=stream)
    made.follow(user("Thanks"), stream=stream)


_CALL = call(arguments='{"a": 1, "b": [true, null, "é"]}', identity="call-1")
_WRITTEN = {"content": " hi\n", "reasoning": "so, so", "tool_calls": [_CALL]}


def _arguments(text: Any) -> Message:
    return {"tool_calls": [{**_CALL, "function": {**_CALL["function"], "arguments": text}}]}


_SPELLINGS: dict[str, Message] = {
    "as it came": {},
    "stripped": {"content": "hi"},
    "as parts": {"content": [{"type": "text", "text": " hi\n"}]},
    "reasoning dropped": {"reasoning": None},
    "arguments as an object": _arguments({"b": [True, None, "é"], "a": 1}),
    "calls without a type": {"tool_calls": [{"id": "call-1", "function": _CALL["function"]}]},
    "more fields": {"refusal": None, "audio": None, "annotations": [], "function_call": None, "x": 1},
}


@pytest.mark.parametrize("other", _SPELLINGS.values(), ids=_SPELLINGS)
def test_spellings_of_one_message(talk: Make, other: Message) -> None:
    """In the next request, or only later on."""
    for later in (False, True):
        made = talk()
        made.ask(reply=Reply(SPLIT, message=_WRITTEN))
        new = result(_CALL, "1")
        if later:
            made.follow(new, reply=Reply(SPLIT, message={"reasoning": "then"}))
            new = user("And?")
        made.messages[1] = {**made.messages[1], **other}
        made.follow(new)
        made.follow(user("more"))


def _as_smolagents(text: str, identity: str, name: str, arguments: object) -> str:
    function = {"name": name, "arguments": arguments}
    return f"{text}\nCalling tools:\n{[{'id': identity, 'type': 'function', 'function': function}]}"


_PRINTED = _as_smolagents("hi", "call-1", "f", {"a": 1, "b": [True, None, "é"]})
_RUN = "I run <code>\nf(1)\n"


@pytest.mark.parametrize(
    ("message", "finish", "stop", "sent"),
    [
        (_WRITTEN, "tool_calls", None, _PRINTED),
        (
            {"content": "I run <code>\nf(1)\n"},
            "stop",
            "</code>",
            _as_smolagents(f"{_RUN}</code>", "call_1", "python_interpreter", "f(1)"),
        ),
    ],
    ids=["calls", "code"],
)
def test_calls_that_smolagents_writes_into_the_text(
    talk: Make, message: Message, finish: str, stop: str | None, sent: str
) -> None:
    for edit in ("", " # and more", "[]", sent):
        made = talk()
        made.ask(reply=Reply(SPLIT, message=message, finish=finish, stop=stop))
        made.messages[1] = {"role": "assistant", "content": sent + edit}
        if edit:
            assert made.ask(user("1")).reason != ""
        else:
            made.follow(user("1"), reply=Reply(SPLIT, message=message, finish=finish, stop=stop))
            made.messages[-1] = {"role": "assistant", "content": sent.replace("call_1", "call_2")}
            made.follow(user("more"))


_EDITS: dict[str, Message] = {
    "text": {"content": "ha"},
    "arguments": _arguments('{"a": 2, "b": [true, null, "é"]}'),
    "role": {"role": "user", "tool_calls": None},
    "a call in the text": {"content": f"{_PRINTED}, 0", "tool_calls": None},
}


@pytest.mark.parametrize("edit", _EDITS.values(), ids=_EDITS)
def test_ids_before_an_edited_turn_are_kept(talk: Make, edit: Message) -> None:
    made = talk()
    made.ask(reply=Reply(SPLIT))
    before, question = made.ids, user("more")
    made.follow(question, reply=Reply((80, *SPLIT), message=_WRITTEN))
    edited = {**made.messages[-1], **edit}
    made.messages = made.messages[:2]
    answered = made.follow(question, edited, user("And?"), expected=before)
    # a last turn that is no assistant's any more looks like one that was left out
    assert answered.reason == ("" if edit.get("role") == "user" else "history_edited")


def test_messages_that_the_engine_merges_into_the_first_are_rendered(talk: Make) -> None:
    """Its template does not know the role `developer`, so such a message changes the start of the prompt."""
    made, kind = talk(), {"role": "system", "content": "Be kind"}
    made.ask(reply=Reply(SPLIT))
    made.follow(kind, user("more"))
    answered = made.ask({"role": "developer", "content": "Be brief"}, user("And?"))
    assert (answered.sent, answered.reason) == (None, "template_unsupported")
    made.follow(user("Go on"))


@EVERY_SPELLING
@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_can_be_continued(talk: Make, stream: bool) -> None:
    others = (Reply((*SPLIT, 80)), Reply((81, END)))
    made = talk()
    answered = made.ask(reply=Reply(SPLIT, others=others), n=3, stream=stream)
    prompt = made.ids[: -len(SPLIT)]
    assert len(answered.messages) == 3
    for ids, message in zip([SPLIT, others[0].ids, others[1].ids], answered.messages, strict=True):
        made.messages = [made.messages[0], message]
        made.follow(user("more"), expected=[*prompt, *ids])


@EVERY_SPELLING
def test_stop_strings(talk: Make) -> None:
    made = talk(fields={"stop": ["x"]})
    made.ask(reply=Reply(SPLIT[:-1], finish="stop", stop="x"))
    if made.pair.fake.variant is Variant.CHAT:
        made.messages[-1]["content"] += "x"  # was sampled, and is not shown: smolagents puts it back
        made.follow(user("more"))
    else:  # that route cannot do it; plain requests must not fail for that
        assert made.ask(user("more")).prompt["source"] == "rendered"


def test_what_a_router_between_proxy_and_engines_can_use(talk: Make) -> None:
    """docs/kubernetes.md: the whole history next to the exact ids, one session, and the picker's headers."""
    made = talk()
    first = made.ask()
    made.headers = {"x-gateway-inference-fairness-id": "team"}
    history = [*made.messages, user("And?")]
    made.follow(user("And?"))
    seen = made.pair.fake.last()
    assert seen.json["messages"] == history
    assert seen.header("x-session-id") == first.session.encode()
    assert seen.header("x-gateway-inference-fairness-id") == b"team"


def _sent_again(made: Talk, count: int, **more: Any) -> httpx.Response:
    """The first request in a session of the conversation's own, as the SDK counts its retries."""
    session = made.messages[0]["content"].replace(" ", "-")
    headers = {"x-session-id": session, "x-stainless-retry-count": str(count), **more.pop("headers", {})}
    return made.pair.client.post(CHAT, json={"messages": made.messages, **more}, headers=headers)


def test_a_retry_is_known_by_its_count_and_runs_anew_if_the_first_request_failed(talk: Make) -> None:
    made = talk()
    made.pair.fake.replies.append(Reply(error=Canned(error_body("busy", "Error", None, 429), 429)))
    failed, second, third = (_sent_again(made, count) for count in range(3))
    assert (failed.status_code, second.status_code) == (429, 200)
    assert "x-request-replayed" not in second.headers
    assert (third.content, third.headers["x-request-replayed"]) == (second.content, "true")
    session = made.pair.client.get(f"/v1/sessions/{second.headers['x-session-id']}").json()
    assert [turn["id"] for turn in session["turns"]] == [second.headers["x-turn-id"]]


@pytest.mark.parametrize("stream", [False, True])
def test_repeated_key_waits_for_the_first_response(talk: Make, stream: bool) -> None:
    made = talk()
    fields = {"stream": stream, "headers": {"idempotency-key": made.messages[0]["content"]}}
    made.pair.fake.replies.append(Reply((91, 92, END), hold_at=0))
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(_sent_again, made, 0, **fields)
        wait_until(lambda: made.pair.fake.running)
        others = [pool.submit(_sent_again, made, 0, **fields) for _ in range(3)]
        made.pair.client.get("/v1/sessions")  # what was sent before this has arrived
        made.pair.fake.release()
        assert {other.result().content for other in others} == {first.result().content}
    assert len(made.pair.fake.generations()) == 1
