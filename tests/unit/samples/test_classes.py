"""Classes of turns: what structure proves, and samples of some classes only."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.trees import child, random_trees, root
from tokenproxy.record.turn import Turn
from tokenproxy.samples.classes import agents_of, classes_of
from tokenproxy.samples.samples import Samples, Selection, samples_of

_TOOLS = b'[{"type": "function"}]'


def _messages(*pairs: tuple[str, Any]) -> bytes:
    return msgspec.json.encode([{"role": role, "content": content} for role, content in pairs])


def _main(name: str = "a", **fields: Any) -> Turn:
    messages = _messages(("system", "You code."), ("user", "Fix it."))
    return root(name, [1], [2], **{"messages": messages, "tools": _TOOLS, **fields})


_WITH_TOOLS = {"tools": _TOOLS}
_CLAUDE = "Your task is to create a detailed summary of this conversation. Go"
_CODEX = "You are performing a CONTEXT CHECKPOINT COMPACTION. Create"


@pytest.mark.parametrize(
    ("pairs", "fields", "expected"),
    [
        ([("system", "Look!"), ("user", "Where?")], _WITH_TOOLS, "subagent"),
        ([("developer", [{"type": "text", "text": "Look!"}]), ("user", "Where?")], _WITH_TOOLS, "subagent"),
        # what programs put at the end of their prompt changes
        ([("system", "You code.\n# Now: another day"), ("user", "A summary")], _WITH_TOOLS, ""),
        # a changed prompt of the same conversation, the same prompt again, and what has no system text
        ([("system", "You code, today."), ("user", "Fix it."), ("assistant", "?")], _WITH_TOOLS, ""),
        ([("system", "Look!"), ("user", "Where?")], {}, ""),
        # side calls
        ([("system", "Title!"), ("user", "Fix it.")], {"requested_model": "claude-haiku-9"}, "auxiliary"),
        ([("user", "Hi"), ("assistant", "Ho"), ("user", "Hi")], {"requested_model": "haiku"}, ""),
        # summaries
        ([("user", [{"type": "text", "text": _CLAUDE}])], _WITH_TOOLS, "compaction"),
        ([("user", _CODEX)], {}, "compaction"),
    ],
)
def test_first_turns_of_a_session(pairs: Any, fields: dict[str, Any], expected: str) -> None:
    turn = root("b", [1], [2], messages=_messages(*pairs), **fields)
    assert classes_of([turn, _main()])["b"] == expected


def test_a_side_call_before_the_first_turn() -> None:
    """A title is asked for first; the conversation itself is no sub-agent of it."""
    title = root("0", [1], [2], messages=_messages(("system", "Name it."), ("user", "Fix it.")))
    other = _messages(("system", "Look!"), ("user", "Where?"))
    look = root("b", [1], [2], messages=other, tools=_TOOLS)
    assert classes_of([title, _main(), look]) == {"0": "", "a": "", "b": "subagent"}


def test_system_messages_within_a_conversation_do_not_tell_its_agent() -> None:
    """Claude Code sends them, in another order after a summary."""
    reminders = ("system", "Tools: look, edit"), ("system", "Today is Thursday.")
    a = _main(messages=_messages(("system", "You code."), ("user", "Fix it."), *reminders))
    other = _messages(("system", "You code."), ("user", "A summary"), *reversed(reminders))
    assert classes_of([a, root("b", [1], [2], messages=other, tools=_TOOLS)]) == {"a": "", "b": ""}


def test_a_sub_agent_stays_one_and_what_is_stated_decides() -> None:
    a, other = _main(), _messages(("system", "Look!"), ("user", "Where?"))
    b = root("b", [1], [2], messages=other, tools=_TOOLS)
    c = child("c", b, [3], [4])
    assert classes_of([c, b, a]) == {"a": "", "b": "subagent", "c": "subagent"}
    stated = root("b", [1], [2], messages=other, tools=_TOOLS, request_class="main")
    assert classes_of([a, stated, child("c", stated, [3], [4])]) == {"a": "", "b": "main", "c": ""}


def test_agents() -> None:
    a = _main(request_class="main")
    b = root("b", [1], [2], request_class="subagent", agent="a1")
    c = root("c", [1], [2], request_class="subagent", agent="a2", parent_agent="a1")
    d = child("d", a, [3], [4], request_class="compaction")
    turns = [d, c, b, a]
    assert agents_of(turns, classes_of(turns)) == [
        {"id": None, "parent": None, "classes": ["main", "compaction"], "turns": 2, "first_turn": "a"},
        {"id": "a1", "parent": None, "classes": ["subagent"], "turns": 1, "first_turn": "b"},
        {"id": "a2", "parent": "a1", "classes": ["subagent"], "turns": 1, "first_turn": "c"},
    ]


def _program() -> list[Turn]:
    a = root("a", [1], [2], request_class="main")
    b = child("b", a, [3], [4], request_class="main")
    c = child("c", b, [5], [6], request_class="compaction")
    d = root("d", [7], [8], request_class="subagent", agent="a1", parent_agent="a0")
    return [a, b, c, d, root("e", [9], [10])]


def _masks(found: Samples) -> dict[str, list[int]]:
    return {sample.leaf: sample.loss_mask for sample in found.samples}


@pytest.mark.parametrize(
    "wanted, masks",
    [
        ((), {"c": [1, 0, 1, 0, 1], "d": [1], "e": [1]}),
        (("main",), {"b": [1, 0, 1]}),
        (("compaction",), {"c": [0, 0, 0, 0, 1]}),
        (("subagent",), {"d": [1]}),
    ],
)
def test_only_turns_of_these_classes_are_trained(
    wanted: tuple[str, ...], masks: dict[str, list[int]]
) -> None:
    assert _masks(samples_of(_program(), {}, selection=Selection(classes=frozenset(wanted)))) == masks


def test_a_refused_leaf_leaves_the_wanted_turns_before_it() -> None:
    a = root("a", [1], [2], request_class="main")
    b = child("b", a, [3], [4], request_class="subagent")
    c = child("c", b, [5], [6], request_class="main", problem="usage_mismatch")
    assert _masks(samples_of([a, b, c], {}, selection=Selection(classes=frozenset({"main"})))) == {
        "b": [1, 0, 0]
    }
    assert _masks(samples_of([b, c], {}, selection=Selection(classes=frozenset({"main"})))) == {}


@settings(derandomize=True, max_examples=15)
@given(random_trees(), st.data())
def test_classes_divide_what_is_trained(drawn: Any, data: st.DataObject) -> None:
    """With one class at a time, the same turns are trained as with all, and each of them once."""
    turns, rewards = drawn
    names = st.sampled_from(["main", "subagent", ""])
    turns = [msgspec.structs.replace(turn, request_class=data.draw(names)) for turn in turns]

    def trained(*wanted: str) -> list[str]:
        samples = samples_of(turns, rewards, selection=Selection(classes=frozenset(wanted))).samples
        return sorted(span.id for sample in samples for span in sample.turns if span.trained)

    everything = ("main", "subagent", "unknown")
    assert sorted(turn for name in everything for turn in trained(name)) == trained()
    assert trained(*everything) == trained()
