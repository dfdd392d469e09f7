"""Clients that send a conversation back a little differently, and edits that stay edits."""

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_vllm import Reply
from tests.support.talk import Message, Talk, call, result, user
from tests.support.tiny_model import CHATML, SPLIT, make_tiny_model

_LONG = 1234567890123456789
"""JavaScript prints it as 1234567890123456800."""
_ARGUMENTS = json.dumps({"id": _LONG, "city": "Rome", "days": 2})
_TOOL: Message = {
    "type": "function",
    "function": {"name": "f", "description": "Asks.", "parameters": {"type": "object"}},
}
_SYSTEM = {"role": "system", "content": "Be brief."}

Change = Callable[[Talk], Any]


def _called(talk: Callable[..., Talk], **options: Any) -> Talk:
    """A conversation of two turns: a text with two calls and their results, then again."""
    made = talk(fields={"tools": [copy.deepcopy(_TOOL)]})
    made.messages.insert(0, _SYSTEM)
    for number in range(2):
        calls = [call(arguments=_ARGUMENTS), call("g", f'{{"n": {number}}}')]
        message = {"content": f"I look {number}.\n", "tool_calls": calls}
        made.ask(reply=Reply((*SPLIT[:-1], 80 + number, SPLIT[-1]), message=message), **options)
        made.messages += [result(each, f"r{number} {each['function']['name']}") for each in calls]
    return made


def _turn(made: Talk, index: int = -1) -> Message:
    return [message for message in made.messages if message["role"] == "assistant"][index]


def _rename(made: Talk, index: int = -1, ids: Sequence[str] = ()) -> Any:
    """New ids for the calls of a turn and their results."""
    for position, each in enumerate(_turn(made, index)["tool_calls"]):
        old, each["id"] = each["id"], ids[position] if ids else f"call_{index}_{position}"
        for message in made.messages:
            if message.get("tool_call_id") == old:
                message["tool_call_id"] = each["id"]


def _argue(made: Talk, **arguments: Any) -> Any:
    """Change arguments of the last turn's first call."""
    function = _turn(made)["tool_calls"][0]["function"]
    function["arguments"] = json.dumps({**json.loads(function["arguments"]), **arguments})


def _add_fields(made: Talk) -> None:
    """Fields that vLLM passes to templates."""
    called = _turn(made)["tool_calls"][0]
    called.update(index=0)
    called["function"].update(parsed_arguments={"a": 1})
    text = {"type": "text", "text": made.messages[1]["content"], "cache_control": {"type": "ephemeral"}}
    _set(made, 1, content=[text])


def _set(made: Talk, index: int, **fields: Any) -> Any:
    made.messages[index] = {**made.messages[index], **fields}


def _tool(made: Talk, **fields: Any) -> None:
    made.fields["tools"][0]["function"].update(fields)


_ECHOES: dict[str, tuple[Change, str]] = {
    "as it was": (lambda made: None, ""),
    "a name": (lambda made: _turn(made).update(name="Bob"), ""),
    "names": (lambda made: [each.update(name=each["role"]) for each in made.messages], ""),
    "strict: null": (lambda made: _tool(made, strict=None), ""),
    "null in kwargs": (lambda made: made.fields.update(chat_template_kwargs={"enable_thinking": None}), ""),
    "renamed": (_rename, "call_ids_renamed"),
    "all renamed": (lambda made: [_rename(made, index) for index in (0, 1)], "call_ids_renamed"),
    "rounded": (lambda made: _argue(made, id=1234567890123456800), "integers_rounded"),
    "no text": (lambda made: _turn(made).update(content=None), "text_dropped"),
    "no earlier text": (lambda made: _turn(made, 0).update(content=""), "text_dropped"),
    "placeholder": (lambda made: _turn(made).update(content="(no content)"), "text_dropped"),
    "renamed, no text": (lambda made: [_rename(made), _turn(made).update(content="")], "text_dropped"),
    "no white space": (lambda made: _turn(made).update(content="I look 1."), "text_stripped"),
    "no earlier white space": (lambda made: _turn(made, 0).update(content="I look 0."), "text_stripped"),
    "character": (lambda made: _turn(made).update(content="I look 1.\n\ufffd"), "character_cut"),
    "parts": (lambda made: _set(made, 1, content=["", made.messages[1]["content"], ""]), ""),
    "more fields": (lambda made: _add_fields(made), ""),
}
_EDITS: dict[str, tuple[Change, str]] = {
    "digit": (lambda made: _argue(made, days=3), "history_edited"),
    "value": (lambda made: _argue(made, city="Roma"), "history_edited"),
    "new argument": (lambda made: _argue(made, more=1), "history_edited"),
    "beyond rounding": (lambda made: _argue(made, id=_LONG + 1), "history_edited"),
    "another double": (lambda made: _argue(made, id=1234567890123457000), "history_edited"),
    "integer as text": (lambda made: _argue(made, id=str(_LONG)), "history_edited"),
    "blank lines": (lambda made: _turn(made).update(content="\n\nI look 1.\n"), "history_edited"),
    "other white space": (lambda made: _turn(made).update(content="I look 1. "), "history_edited"),
    "earlier blank lines": (lambda made: _turn(made, 0).update(content="\nI look 0.\n"), "history_edited"),
    "character within": (lambda made: _turn(made).update(content="I look\ufffd 1.\n"), "history_edited"),
    "one id for two calls": (lambda made: _rename(made, ids="xx"), "history_edited"),
    "the id of an earlier call": (
        lambda made: _rename(made, ids=[_turn(made, 0)["tool_calls"][0]["id"], "x"]),
        "history_edited",
    ),
    "other text": (lambda made: _turn(made).update(content="I lie."), "history_edited"),
    "new reasoning": (lambda made: _turn(made).update(reasoning="so"), "history_edited"),
    "other function": (
        lambda made: _turn(made)["tool_calls"][0]["function"].update(name="h"),
        "history_edited",
    ),
    "calls swapped": (lambda made: _turn(made)["tool_calls"].reverse(), "history_edited"),
    "call dropped": (lambda made: _turn(made)["tool_calls"].pop(), "history_edited"),
    "earlier results swapped": (
        lambda made: [_set(made, 3, content="r0 g"), _set(made, 4, content="r0 f")],
        "history_edited",
    ),
    "earlier results in another order": (
        lambda made: made.messages.insert(3, made.messages.pop(4)),
        "history_edited",
    ),
    "id only in an earlier result": (lambda made: _set(made, 3, tool_call_id="call_x"), "history_edited"),
    "earlier digit": (lambda made: _set(made, 3, content="r1 f"), "history_edited"),
    "message dropped": (lambda made: made.messages.pop(4), "history_edited"),
    "system prompt": (lambda made: _set(made, 0, content="Be long."), "history_edited"),
    "question": (lambda made: _set(made, 1, content="Ho"), "history_edited"),
    "renamed and edited": (lambda made: [_rename(made), _argue(made, days=3)], "history_edited"),
    "tool's description": (lambda made: _tool(made, description="Tells."), "tools_changed"),
    "strict tool": (lambda made: _tool(made, strict=True), "tools_changed"),
    "template's argument": (
        lambda made: made.fields.update(chat_template_kwargs={"enable_thinking": False}),
        "template_kwargs_changed",
    ),
}


@pytest.mark.parametrize(("change", "reason"), _ECHOES.values(), ids=_ECHOES)
def test_an_echo_keeps_the_sampled_ids(talk: Callable[..., Talk], change: Change, reason: str) -> None:
    made = _called(talk)
    recorded = copy.deepcopy(made.messages[-2:])
    before = made.ids
    change(made)
    answered = made.ask(reply=Reply(SPLIT))
    assert answered.source == "extended" + (f": {reason}" if reason else "")
    whole = made.model.render(
        [*[{"role": "user", "content": "."}, {"role": "assistant", "content": "."}], *recorded]
    )
    assert answered.sent is not None and answered.sent[: len(before)] == before
    assert whole[-len(answered.sent) + len(before) :] == answered.sent[len(before) :]


@pytest.mark.parametrize(("change", "reason"), _EDITS.values(), ids=_EDITS)
def test_an_edit_is_named(talk: Callable[..., Talk], change: Change, reason: str) -> None:
    made = _called(talk)
    last = made.ids
    change(made)
    answered = made.ask(user("more"), reply=Reply(SPLIT))
    assert answered.reason == reason
    assert answered.sent is None or answered.sent[: len(last)] != last


_PRINTS_CALLS = CHATML.replace("{'name': call.function.name, 'arguments': call.function.arguments}", "call")


@pytest.mark.parametrize("function", [False, True])
def test_a_field_of_a_call_that_the_template_prints_is_an_edit(
    own_talk: Callable[..., Talk], tmp_path: Path, function: bool
) -> None:
    assert _PRINTS_CALLS != CHATML
    model = make_tiny_model(tmp_path, _PRINTS_CALLS)
    talk = own_talk(model=model)
    made = _called(lambda fields: Talk(talk.pair, model, fields=fields))
    last, called = made.ids, _turn(made)["tool_calls"][0]
    (called["function"] if function else called).update(foo="bar")
    answered = made.ask(reply=Reply(SPLIT))
    assert answered.reason == "history_edited"
    assert answered.sent is None or answered.sent[: len(last)] != last


def test_an_echo_that_may_mean_two_turns_is_ambiguous(talk: Callable[..., Talk]) -> None:
    """Nothing decides between two rollouts, and a turn that another continues is not meant again."""
    one = _called(talk)
    two = talk(fields=one.fields)
    two.messages = [*copy.deepcopy(one.messages[:2])]
    calls = [call(arguments=_ARGUMENTS), call("g", '{"n": 0}')]
    two.ask(reply=Reply((*SPLIT[:-1], 90, SPLIT[-1]), message={"content": "Or so.", "tool_calls": calls}))
    two.messages += [result(each, "r") for each in calls]
    again = copy.deepcopy(two.messages)
    _turn(two)["content"] = None
    _rename(two)
    assert two.ask(reply=Reply(SPLIT)).reason == "ambiguous"
    two.messages = again
    two.ask(reply=Reply(SPLIT))
    _rename(two, 0)
    two.messages = two.messages[:5]
    assert two.ask(reply=Reply(SPLIT)).reason == "history_edited"


@pytest.mark.parametrize("described", [{"echo": "exact"}, {"overrides": {"echo_policy": "exact"}}, {}])
def test_a_session_may_ask_for_exact_echoes(talk: Callable[..., Talk], described: dict[str, Any]) -> None:
    made = _called(talk, echo_policy="lenient")
    session = made.client.post("/v1/sessions", json=described).json()["id"]
    made.headers["x-session-id"] = session
    made.messages = made.messages[:2]
    calls = [call(arguments=_ARGUMENTS)]
    made.ask(reply=Reply(SPLIT, message={"content": "I look.", "tool_calls": calls}))
    made.messages += [result(calls[0], "r")]
    _rename(made)
    assert made.ask(reply=Reply(SPLIT)).reason == ("no_match" if described else "call_ids_renamed")
