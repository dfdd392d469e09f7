"""Plain OpenAI conversations stay exact, however clients spell them; a turn that does not is reported."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from proxy.settings import Settings
from tests.support.fake_vllm import Reply, Variant
from tests.support.talk import Message, Talk, call, result, user
from tests.support.tiny_model import END, HI
from tests.support.utils import EVERY_SPELLING, Pair, run_app, wait_until

Make = Callable[..., Talk]
SPLIT = (74, 71, 78, 78, 81, END)
"""Of "hello", an id for each letter: a tokenizer gives three."""


def test_the_ids_of_these_tests_are_none_that_a_tokenizer_would_give(talk: Make) -> None:
    """Otherwise nothing here would tell recorded ids from those of a rendering."""
    model = talk().model
    assert model.encode(model.decode(list(SPLIT))) != list(SPLIT[:-1])


@EVERY_SPELLING
@pytest.mark.parametrize("streams", ["....", "ssss", ".s.s"])
def test_turns_continue_the_ids_of_the_previous_turn(talk: Make, streams: str) -> None:
    made = talk()
    first = made.ask(reply=Reply(SPLIT), stream=streams[0] == "s")
    assert first.prompt == {"source": "rendered", "reused": "0", "reason": "first_turn"}
    for index, how in enumerate(streams):
        answered = made.follow(user(f"more {index}"), reply=Reply(SPLIT), stream=how == "s")
        assert answered.reason == ""


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
    "stripped parts": {"content": [{"type": "text", "text": "hi"}]},
    "reasoning dropped": {"reasoning": None},
    "reasoning empty": {"reasoning": ""},
    "reasoning under its other name": {"reasoning": None, "reasoning_content": "so, so"},
    "reasoning under both names": {"reasoning_content": "so, so"},
    "reasoning stripped": {"reasoning": "so, so "},
    "arguments in another order": _arguments('{"b":[true,null,"\\u00e9"],"a":1}'),
    "arguments with spaces": _arguments('{ "a" : 1,\n"b" : [ true, null, "é" ] }'),
    "arguments as an object": _arguments({"b": [True, None, "é"], "a": 1}),
    "calls without a type": {"tool_calls": [{"id": "call-1", "function": _CALL["function"]}]},
    "more fields": {"refusal": None, "audio": None, "annotations": [], "function_call": None, "x": 1},
}


@EVERY_SPELLING
@pytest.mark.parametrize("other", _SPELLINGS.values(), ids=_SPELLINGS)
def test_spellings_of_one_message(talk: Make, other: Message) -> None:
    """In the next request, or only later on."""
    for later in (False, True):
        made = talk()
        made.ask(reply=Reply(SPLIT, message=_WRITTEN))
        if later:
            made.follow(result(_CALL, "1"), reply=Reply(SPLIT, message={"reasoning": "then"}))
        made.messages[1] = {**made.messages[1], **other}
        if later:
            made.follow(user("And?"))
        made.follow(result(_CALL, "1") if not later else user("more"))
        made.follow(user("more"))


def test_reasoning_dropped_of_all_turns(talk: Make) -> None:
    made = talk()
    for index in range(4):
        asking = made.follow if index else made.ask
        asking(*([user("more")] if index else []), reply=Reply(SPLIT, message={"reasoning": f"r{index}"}))
        for message in made.messages:
            message.pop("reasoning", None)


@pytest.mark.parametrize("content", [None, "", [], ...])
@pytest.mark.parametrize("calls", [True, False])
def test_contents_without_text(talk: Make, content: Any, calls: bool) -> None:
    made = talk()
    sampled = {"content": None, **({"tool_calls": [_CALL]} if calls else {})}
    made.ask(reply=Reply(SPLIT, message=sampled))
    made.messages[-1]["content"] = content
    if content is ...:
        del made.messages[-1]["content"]
    made.follow(result(_CALL, "1") if calls else user("more"))


_EDITS: dict[str, Message] = {
    "text": {"content": "ha"},
    "case": {"content": " Hi\n"},
    "a space inside": {"content": "h i"},
    "reasoning": {"reasoning": "so, no"},
    "arguments": _arguments('{"a": 2, "b": [true, null, "é"]}'),
    "the fraction of a number": _arguments('{"a": 1.5, "b": [true, null, "é"]}'),
    "true for 1": _arguments('{"a": true, "b": [true, null, "é"]}'),
    "the order of a list": _arguments('{"a": 1, "b": [null, true, "é"]}'),
    "the call's id": {"tool_calls": [{**_CALL, "id": "call-2"}]},
    "no call": {"tool_calls": []},
    "one call more": {"tool_calls": [_CALL, call()]},
    "the name": {"tool_calls": [{**_CALL, "function": {**_CALL["function"], "name": "g"}}]},
    "role": {"role": "user", "tool_calls": None},
}


@EVERY_SPELLING
@pytest.mark.parametrize("edit", _EDITS.values(), ids=_EDITS)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_ids_before_an_edited_turn_are_kept(talk: Make, edit: Message, depth: int) -> None:
    made = talk()
    ids: list[list[int]] = []
    for index in range(3):
        reply = Reply((80 + index, *SPLIT), message=_WRITTEN if index == depth else {})
        (made.follow if index else made.ask)(*([user("more")] if index else []), reply=reply)
        ids.append(made.ids)
    at = 1 + 2 * depth
    made.messages[at] = {**made.messages[at], **edit}
    new = made.messages[2 * depth :]
    made.messages = made.messages[: 2 * depth]
    if depth:
        answered = made.follow(*new, user("And?"), expected=ids[depth - 1])
    else:
        answered = made.ask(*new, user("And?"))
        assert (answered.sent, answered.prompt["source"]) == (None, "rendered")
    # a last turn that is no assistant's any more looks like one that was left out
    assert answered.reason == ("" if (depth, edit.get("role")) == (2, "user") else "history_edited")
    made.follow(user("Go on"))


def test_tool_calls_in_another_order(talk: Make) -> None:
    made, calls = talk(), [call(), call()]
    made.ask(reply=Reply(SPLIT, message={"tool_calls": calls}))
    made.messages[-1]["tool_calls"] = calls[::-1]
    assert made.ask(result(calls[0], "1"), result(calls[1], "2")).reason == "no_match"


@pytest.mark.parametrize("at", [0, 1, 3])
def test_edited_message_ends_the_reuse_of_ids(talk: Make, at: int) -> None:
    """System prompt, question, tool result."""
    made = talk()
    made.messages = [{"role": "system", "content": "Be kind"}, *made.messages]
    one = call()
    made.ask(reply=Reply(SPLIT, message={"tool_calls": [one]}))
    before = made.ids
    made.follow(result(one, "1"), reply=Reply(SPLIT))
    made.messages[at] = {**made.messages[at], "content": "edited"}
    if at == 3:
        new, made.messages = made.messages[3:], made.messages[:3]
        answered = made.follow(*new, user("And?"), expected=before)
    else:
        answered = made.ask(user("And?"))
        assert answered.sent is None
    assert answered.reason == "history_edited"
    made.follow(user("Go on"))


def test_messages_that_the_engine_merges_into_the_first_are_rendered(talk: Make) -> None:
    """Its template does not know the role `developer`, so such a message changes the start of the prompt."""
    made, kind = talk(), {"role": "system", "content": "Be kind"}
    made.ask(reply=Reply(SPLIT))
    made.follow(kind, user("more"))
    answered = made.ask({"role": "developer", "content": "Be brief"}, user("And?"))
    assert (answered.sent, answered.reason) == (None, "template_unsupported")
    made.follow(user("Go on"))
    answered = made.ask(kind, user("And?"))
    assert (answered.sent, answered.reason) == (None, "template_unsupported")
    made.follow(user("Go on"))


def test_a_turn_that_was_left_out(talk: Make) -> None:
    made = talk()
    made.ask(reply=Reply(SPLIT))
    first = made.ids
    made.follow(user("more"))
    made.messages = made.messages[:2]
    made.follow(user("even more"), expected=first)


# --- the reason is the true one


def test_edited_reasoning_of_the_only_turn_is_an_edit(talk: Make) -> None:
    made = talk()
    made.ask(reply=Reply(SPLIT, message={"reasoning": "so"}))
    made.messages[-1]["reasoning"] = "no"
    assert made.ask(user("more")).reason == "history_edited"


_TOOLS = [{"type": "function", "function": {"name": "f", "description": "d"}}]
_CHANGES: dict[str, tuple[Message, Message, str]] = {
    "tools": ({"tools": _TOOLS}, {}, "tools_changed"),
    "tools in another order of keys": (
        {"tools": _TOOLS},
        {"tools": [{"type": "function", "function": {"description": "d", "name": "f"}}]},
        "tools_changed",
    ),
    "no tools for none, and another argument": (
        {"tools": []},
        {"chat_template_kwargs": {"a": 1}},
        "template_kwargs_changed",
    ),
    "arguments": ({}, {"chat_template_kwargs": {"a": 1}}, "template_kwargs_changed"),
    "true for 1": (
        {"chat_template_kwargs": {"a": 1}},
        {"chat_template_kwargs": {"a": True}},
        "template_kwargs_changed",
    ),
    "effort": ({}, {"reasoning_effort": "low"}, "template_kwargs_changed"),
    "model": ({}, {"model": "adapter"}, "model_changed"),
}


@pytest.mark.parametrize("before, after, reason", _CHANGES.values(), ids=_CHANGES)
@pytest.mark.parametrize("session", ["none", "named", "told"])
def test_changed_fields_other_than_messages_are_reported(
    talk: Make, before: Message, after: Message, reason: str, session: str
) -> None:
    made = talk(fields=before)
    if session == "named":
        made.headers["x-session-id"] = made.messages[0]["content"].replace(" ", "-")
    first = made.ask(reply=Reply(SPLIT))
    if session == "told":
        made.headers["x-session-id"] = first.session
    made.fields = after
    answered = made.ask(user("more"))
    assert (answered.sent, answered.prompt["source"], answered.reason) == (None, "rendered", reason)
    made.follow(user("more"))


# --- several at once


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
@pytest.mark.parametrize("one_by_one", [False, True])
def test_choices_of_a_stream_that_end_at_different_times(talk: Make, one_by_one: bool) -> None:
    """Also where one has ended before another has begun."""
    others = (Reply((*SPLIT, 80, END)), Reply((81, 82, END)))
    made = talk()
    made.ask(reply=Reply(SPLIT))
    script = Reply((83, END), others=others, one_by_one=one_by_one)
    answered = made.follow(user("more"), reply=script, n=3, stream=True)
    prompt, question = made.ids[:-2], made.messages[:-1]
    turns = made.pair.client.get(f"/v1/sessions/{answered.session}").json()["turns"][1:]
    assert [turn["completion_tokens"] for turn in turns] == [2, 8, 3]
    assert [turn["finish_reason"] for turn in turns] == ["stop"] * 3
    for message, ids in zip(answered.messages[1:], [others[0].ids, others[1].ids], strict=True):
        made.messages = [*question, message]
        made.follow(user("more"), expected=[*prompt, *ids])


def test_session_distinguishes_equal_text_with_different_ids(talk: Make) -> None:
    one, two = talk(), talk()
    two.messages = list(one.messages)
    one.headers["x-session-id"], two.headers["x-session-id"] = (
        f"{made}-{one.messages[0]['content'][3:]}" for made in ("one", "two")
    )
    one.ask(reply=Reply((*HI, END), message={"content": "same"}))
    two.ask(reply=Reply(SPLIT, message={"content": "same"}))
    for made in (one, two, one, two):
        assert "candidates" not in made.follow(user("more")).prompt


def test_tool_call_ids_distinguish_equal_text_with_different_ids(talk: Make) -> None:
    one, two, calls = talk(), talk(), [call(), call()]
    two.messages = list(one.messages)
    one.ask(reply=Reply((*HI, END), message={"content": "same", "tool_calls": [calls[0]]}))
    two.ask(reply=Reply(SPLIT, message={"content": "same", "tool_calls": [calls[1]]}))
    one.follow(result(calls[0], "1"))
    two.follow(result(calls[1], "1"))


def test_equal_text_with_different_ids_is_rendered_if_ambiguous(talk: Make) -> None:
    one, two = talk(), talk()
    two.messages = list(one.messages)
    one.ask(reply=Reply((*HI, END), message={"content": "same"}))
    two.ask(reply=Reply(SPLIT, message={"content": "same"}))
    before = _counter(two, "tokenproxy_ambiguous_prompts_total")
    answered = two.ask(user("more"))
    assert (answered.sent, answered.reason, answered.prompt["candidates"]) == (None, "ambiguous", "2")
    assert _counter(two, "tokenproxy_ambiguous_prompts_total") == before + 1


_TOLD_APART: dict[str, tuple[Message, Message]] = {
    "white space": ({"content": "same"}, {"content": "same "}),
    "reasoning": ({"content": "same", "reasoning": "so"}, {"content": "same"}),
}


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("pair_of", _TOLD_APART.values(), ids=_TOLD_APART)
def test_the_spelling_of_the_client_decides(
    talk: Make, pair_of: tuple[Message, Message], swap: bool, depth: int
) -> None:
    """The first turns differ, the later ones are equal."""
    one, two = talk(), talk()
    two.messages = list(one.messages)
    one.ask(reply=Reply((*HI, END), message=pair_of[swap]))
    two.ask(reply=Reply(SPLIT, message=pair_of[not swap]))
    for _ in range(depth):
        one.follow(user("more"))
        two.follow(user("more"))
    assert one.follow(user("And?")).prompt["candidates"] == "2"
    assert two.follow(user("And?")).prompt["candidates"] == "2"


def test_a_large_group_with_one_answer_and_many_reasonings(talk: Make) -> None:
    """None is lost, the oldest included: its client sends all of it back."""
    group, question = [talk() for _ in range(20)], talk().messages
    for index, made in enumerate(group):
        made.messages = list(question)
        made.ask(reply=Reply((100 + index, END), message={"content": "42", "reasoning": f"r{index}"}))
    for made in (group[-1], group[0]):
        made.follow(user("Sure?"))


def _counter(made: Talk, name: str) -> float:
    for line in made.pair.client.get("/metrics").text.splitlines():
        if line.startswith(name):
            return float(line.rpartition(" ")[2])
    return 0.0


# --- templates and routes


def test_a_custom_template_ends_with_its_request(talk: Make) -> None:
    """Ids of one template are not silently continued with another."""
    made = talk()
    made.ask(reply=Reply(SPLIT), chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    assert made.ask(user("more")).reason != ""


@EVERY_SPELLING
def test_stop_strings(talk: Make) -> None:
    made = talk(fields={"stop": ["x"]})
    made.ask(reply=Reply(SPLIT[:-1], finish="stop", stop="x"))
    if made.pair.fake.variant is Variant.CHAT:
        made.follow(user("more"))
    else:  # that route cannot do it; plain requests must not fail for that
        assert made.ask(user("more")).prompt["source"] == "rendered"


def test_json_is_read_as_json(talk: Make) -> None:
    """Escapes, white space and repeated requests change nothing."""
    made = talk()
    made.ask(reply=Reply(SPLIT, message={"content": 'é \n"q"'}))
    body = json.dumps({"messages": [*made.messages, user("more")]}, indent=1, ensure_ascii=True)
    made.pair.fake.replies.append(Reply())
    answer = made.pair.client.post("/v1/chat/completions", content=body.encode())
    assert answer.headers["x-prompt-source"] == "extended"


def test_a_proxy_before_a_proxy(pair: Pair) -> None:
    """Each keeps the conversation, and the client is told of the nearer one's prompt, once."""
    with run_app(Settings(upstreams=[str(pair.client.base_url)], store="memory:")) as outer:
        wait_until(lambda: outer.get("/ready").status_code == 200)
        messages = [user("Hi")]
        for source in ("rendered", "extended"):
            answer = outer.post("/v1/chat/completions", json={"messages": messages})
            for name in ("x-prompt-source", "x-prompt-reused", "x-session-id", "x-turn-id"):
                assert len(answer.headers.get_list(name, split_commas=True)) == 1
            assert answer.headers["x-prompt-source"] == source
            messages += [answer.json()["choices"][0]["message"], user("more")]
