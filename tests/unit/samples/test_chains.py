"""Chains of conversations: which turn caused a new one, and that nothing else is taken for it."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.trees import child, root
from tokenproxy.record.turn import Turn
from tokenproxy.samples.chains import links_of
from tokenproxy.samples.classes import classes_of
from tokenproxy.samples.samples import samples_of

_SUMMARY = (
    "The user wants `src/parser.py` fixed: it must read nested lists.\nDone so far: lexer.py (brackets). "
    "Next: write the recursive rule, and run tests/test_parser.py::test_lists."
)
_SYSTEM = {"role": "system", "content": "You are a careful engineer. Work in small steps."}
_TASK = {"role": "user", "content": "Fix the parser."}
_ASK = {"role": "user", "content": "Summarise."}
_AGAIN = {"role": "user", "content": f"<summary>\n{_SUMMARY}\n</summary>\nGo on."}

Message = dict[str, Any]


def _said(content: str | None, **fields: Any) -> Message:
    return {"role": "assistant", "content": content, **fields}


def _new(name: str, messages: list[Message], answer: str = "Fine.", **fields: Any) -> Turn:
    """A turn that begins a conversation."""
    stored = {"messages": msgspec.json.encode(messages), "message": msgspec.json.encode(_said(answer))}
    return root(name, [1], [2, 3], **stored, **fields)


def _next(name: str, parent: Turn, message: Message, answer: str = "Fine.", **fields: Any) -> Turn:
    stored = {"messages": msgspec.json.encode([message]), "message": msgspec.json.encode(_said(answer))}
    return child(name, parent, [4], [5, 6, 7], **stored, **fields)


def _summarised(answer: str = _SUMMARY, **fields: Any) -> list[Turn]:
    """A conversation of two turns; the second, `b`, is the summary of it."""
    a = _new("a", [_SYSTEM, _TASK], "I begin.", **fields)
    return [a, _next("b", a, _ASK, answer, **fields)]


def _links(turns: list[Turn]) -> dict[str, tuple[str, int]]:
    """Cause and number of each segment after the first one, by its first turn."""
    segments = links_of(turns[::-1], classes_of(turns))
    return {
        turn.id: (segments[turn.id].continues, segments[turn.id].number)
        for turn in turns
        if segments[turn.id].continues
    }


@pytest.mark.parametrize(
    "content",
    [
        _SUMMARY,
        f"Summary: {_SUMMARY} Now go on!",
        [{"type": "text", "text": "Before:"}, {"type": "text", "text": f'"{_SUMMARY}"'}],
    ],
)
@pytest.mark.parametrize("answer", [_SUMMARY, f"<analysis>Hm.</analysis>\n<summary>{_SUMMARY}</summary>"])
def test_a_summary_continues(content: Any, answer: str) -> None:
    turns = [*_summarised(answer), _new("c", [_SYSTEM, {"role": "user", "content": content}])]
    assert _links(turns) == {"c": ("b", 1)}


def test_a_chain_goes_on() -> None:
    """Its segments have numbers, every turn of them; what a summary repeats of an earlier one is no cause."""
    second = f"{_SUMMARY} {_SUMMARY[::-1]}"
    c = _new("c", [_SYSTEM, _TASK, _AGAIN])
    d = _next("d", c, _ASK, second)
    e = _new("e", [_SYSTEM, _TASK, {"role": "user", "content": second}])
    turns = [*_summarised(), c, d, e]
    assert _links(turns) == {"c": ("b", 1), "e": ("d", 2)}
    segments = links_of(turns, classes_of(turns))
    assert [segments[turn.id].number for turn in turns] == [0, 0, 1, 1, 2]


def test_a_request_for_a_summary_without_tools_continues_what_it_copies() -> None:
    """As Codex does it; the copied answer may be short, and its call may have lost its arguments."""
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    repaired = {**call, "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "ok"}
    a = _new("a", [_SYSTEM, _TASK], "Yes.", tools=b'[{"type": "function"}]')
    message = msgspec.json.encode(_said(None, tool_calls=[call]))
    b = child("b", a, [4], [5], messages=msgspec.json.encode([_ASK]), message=message)
    for history in ([_said("Yes.")], [_said("Yes."), _ASK, _said("", tool_calls=[repaired]), result]):
        cause = "a" if len(history) == 1 else "b"
        turns = [a] if cause == "a" else [a, b]
        c = _new("c", [_SYSTEM, _TASK, *history, _ASK], _SUMMARY)
        assert _links([*turns, c, _new("d", [_SYSTEM, _TASK, _AGAIN])]) == {"c": (cause, 1), "d": ("c", 2)}


def test_messages_that_are_kept_next_to_a_summary() -> None:
    """Claude Code summarises what came before its last message, and keeps that one."""
    last = _said("I look at the rule for lists, and at its tests. " * 3)
    kept = [_AGAIN, last, {"role": "user", "content": "ok"}]
    for name in ("a2", "b2"):  # requested before the summary, or meanwhile
        a, b = _summarised()
        c = child(name, a, [4], [5], messages=msgspec.json.encode([_TASK]), message=msgspec.json.encode(last))
        assert _links([a, b, c, _new("d", [_SYSTEM, *kept])]) == {"d": ("b", 1)}
    # the next summary is asked for without tools: it continues the copy, which came after the first one
    d = _new("d", [_SYSTEM, _AGAIN])
    e = child("e", d, [4], [5], messages=msgspec.json.encode([_ASK]), message=msgspec.json.encode(last))
    f = _new("f", [_SYSTEM, _AGAIN, _said("Fine."), _ASK, last, _ASK])
    assert _links([*_summarised(), d, e, f]) == {"d": ("b", 1), "f": ("e", 2)}


def test_several_conversations_continue_one_turn() -> None:
    """A request that is sent again, its other choices, and another task from the same summary."""
    other = {"role": "user", "content": "Do it in another way."}
    again = [_new(name, [_SYSTEM, _AGAIN]) for name in "cd"]
    turns = [*_summarised(), *again, _new("e", [_SYSTEM, _AGAIN, other])]
    assert _links(turns) == {"c": ("b", 1), "d": ("b", 1), "e": ("b", 1)}


def test_an_agent_with_a_name_has_a_chain_of_its_own() -> None:
    named = {"agent": "a1", "request_class": "subagent"}
    turns = [*_summarised(**named), _new("c", [_SYSTEM, _AGAIN], **named)]
    assert _links(turns) == {"c": ("b", 1)}
    for fields in ({"agent": "a2", "request_class": "subagent"}, {"request_class": "main"}):
        assert _links([*_summarised(**named), _new("c", [_SYSTEM, _AGAIN], **fields)]) == {}


def test_sub_agents_without_names_are_in_no_chain() -> None:
    """The report of one may be in the prompt of the next."""
    nameless = {"request_class": "subagent"}
    assert _links([*_summarised(**nameless), _new("c", [_SYSTEM, _AGAIN], **nameless)]) == {}


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ([_SYSTEM, _AGAIN], {"request_class": "auxiliary"}),
        ([_SYSTEM, _AGAIN], {"request_class": "subagent"}),
        ([{"role": "system", "content": "Grade this answer."}, _AGAIN], {}),
        ([_AGAIN], {}),
        ([_SYSTEM, _said(_SUMMARY)], {}),
        ([_SYSTEM, _TASK, {"role": "tool", "tool_call_id": "1", "content": _SUMMARY}], {}),
        ([_SYSTEM, {"role": "user", "content": _SUMMARY[:100]}], {}),
    ],
    ids=["side call", "sub-agent", "grader", "no system", "prefill", "tool", "short"],
)
def test_these_continue_nothing(messages: list[Message], fields: dict[str, Any]) -> None:
    assert _links([*_summarised(), _new("c", messages, **fields)]) == {}


def test_messages_that_cannot_be_read_are_in_no_chain() -> None:
    turns = [*_summarised(), root("c", [1], [2], messages=b"7", message=b"7"), _new("d", [_SYSTEM, _AGAIN])]
    assert _links([*turns, root("e", [1], [2], messages=b'[{"role": 7}]')]) == {"d": ("b", 1)}


def test_a_text_that_was_given_to_a_tool_is_no_cause() -> None:
    """The prompt of a sub-agent whose requests look like those of its parent."""
    text = _SUMMARY.replace(". ", ".\n")
    arguments = msgspec.json.encode({"prompt": text}).decode()
    call = {"id": "call_1", "type": "function", "function": {"name": "agent", "arguments": arguments}}
    message = msgspec.json.encode(_said(f"I ask: {text} {text[:-1]}", tool_calls=[call]))
    a = root("a", [1], [2], messages=msgspec.json.encode([_SYSTEM, _TASK]), message=message)
    assert _links([a, _new("c", [_SYSTEM, {"role": "user", "content": f"{text} {_SUMMARY}"}])]) == {}


def test_a_conversation_that_goes_on_was_not_replaced() -> None:
    turns = [*_summarised(), _new("c", [_SYSTEM, _AGAIN])]
    d = _next("d", turns[1], _ASK)
    assert _links([*turns, d]) == {}
    # notes are sampled before the last turn; and terminus-2 asks the old conversation once more
    assert _links([*turns, _next("b1", turns[1], _ASK)]) == {"c": ("b", 1)}
    assert _links([*turns, d, _next("e", turns[2], _ASK)]) == {"c": ("b", 1)}


def test_a_text_that_another_request_sent_first_is_no_cause() -> None:
    # the model repeats its task, which a second attempt has too
    task = {"role": "user", "content": _SUMMARY}
    a = _new("a", [_SYSTEM, task], f"The task: {_SUMMARY}")
    assert _links([a, _new("b", [_SYSTEM, task, {"role": "user", "content": "Try again."}])]) == {}
    # its report went to another conversation, which may have passed it on
    turns = [*_summarised(), _new("c", [{"role": "user", "content": "Lead."}, _AGAIN], request_class="x")]
    other = _new("b1", [{"role": "system", "content": "Lead!"}, _AGAIN])
    assert _links([turns[0], turns[1], other, turns[2]]) == {}


def test_of_two_turns_with_the_text_nothing_decides() -> None:
    a, b = _summarised()
    c = _new("c", [_SYSTEM, _AGAIN])
    assert _links([a, b, _next("b2", a, _ASK, _SUMMARY), c]) == {}
    # one that continues the other is the later part of the same chain
    assert _links([a, b, _next("b2", b, _ASK, _SUMMARY), c]) == {"c": ("b2", 1)}
    # an attempt that broke off holds less
    assert _links([a, b, _next("b2", a, _ASK, _SUMMARY[:140], finish_reason="abort"), c]) == {"c": ("b", 1)}


def test_two_conversations_in_one_are_no_chain() -> None:
    report = f"Reviewed the lexer: {_SUMMARY[::-1]}"
    other = _new("b2", [_SYSTEM, _TASK, _ASK], report)
    both = {"role": "user", "content": f"{_SUMMARY}\n{report}"}
    assert _links([*_summarised(), other, _new("c", [_SYSTEM, both])]) == {}


@settings(derandomize=True, max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=5))
def test_all_that_a_chain_sampled_is_trained_once(parts: list[tuple[int, bool]]) -> None:
    """`parts`: for each segment its turns before the summary, and whether a sub-agent ran meanwhile."""
    turns: list[Turn] = []
    held: list[Message] = [_TASK]
    for number, (count, asks) in enumerate(parts):
        summary = f"Part {number} {'is done and here is what remains to do of it ' * 3}{number}"
        turn = _new(f"{number}-0", [_SYSTEM, *held])
        turns.append(turn)
        for index in range(1, count):
            turn = _next(f"{number}-{index}", turn, _ASK)
            turns.append(turn)
        if asks:
            turns.append(_new(f"{number}-s", [_TASK], agent=f"agent {number}", request_class="subagent"))
        turns.append(_next(f"{number}-z", turn, _ASK, summary))
        held = [{"role": "user", "content": f"So far: {summary}"}]
    found = samples_of(turns, {"": 0.5})
    main = [sample for sample in found.samples if not sample.agent]
    assert [(sample.segment, sample.continues) for sample in main] == [
        (number, f"{number - 1}-z" if number else "") for number in range(len(parts))
    ]
    assert all(sample.segment == 0 for sample in found.samples if sample.agent)
    sampled = sum(turn.completion_tokens for turn in turns)
    assert sum(sum(sample.loss_mask) for sample in found.samples) == sampled
    assert {sample.reward for sample in found.samples} == {0.5}
