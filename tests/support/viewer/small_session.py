"""The session `small`: every kind of turn once."""

from dataclasses import dataclass
from typing import Any

from proxy.history.origin import RequestClass
from proxy.history.turn import Turn, WeightSpan
from proxy.history.vocabulary import Problem, Reason
from tests.support.talk import user
from tests.support.tiny_model import END, TinyModel
from tests.support.viewer.recorder import (
    EMOJI,
    Answer,
    Recorded,
    SessionRecorder,
    answer,
    cut_answer,
    spelled_answer,
    system,
    tool_call,
    tool_result,
)

SMALL = "small"
READ_FILE: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
_OPENING = (system("You are a coding agent."), user("Why does the test fail?"))
_CALL = tool_call("read_file", path="tests/test_list.py")
_RESULT = tool_result("assert sum([1, 2]) == 4")
_SPECIAL = "It opens a message, and <|endoftext|> ends a text."


@dataclass(frozen=True)
class SmallSession:
    """The session, and its turns by what they show."""

    recorded: Recorded
    first: Turn
    """It thinks, and calls a tool."""
    fork: Turn
    """Continues `first`: one of the two choices of its request."""
    other_choice: Turn
    """The other choice, sampled letter by letter: the template would render other ids for it."""
    emoji: Turn
    """Continues `fork`. Each emoji is several ids, none of which is a character; two weight versions."""
    aborted: Turn
    """Continues `other_choice`. Its client left in the middle of an emoji."""
    refused: Turn
    """Continues `emoji`, and cannot be trained on."""
    special: Turn
    """Continues `refused`. A special token is among its sampled ids, and two are in the user's text."""
    subagent: Turn
    """The first turn of a sub-agent. It calls a tool."""
    subagent_end: Turn
    """Continues `subagent`. It was cut at its limit of tokens."""
    broken: Turn
    """The client edited the history: its prompt breaks with the ids of `emoji`, and continues no turn."""
    after_break: Turn
    """Continues `broken`."""


def small_session(model: TinyModel) -> SmallSession:
    """Build it."""
    metadata = {"task": "fix-test", "step": 3, "split": "train"}
    record = SessionRecorder(model, SMALL, tools=[READ_FILE], metadata=metadata)
    thinking = answer(model, "", thinking="I read the file first.", calls=[_CALL])
    first = record.turn(_OPENING, thinking)
    sound = answer(model, "The test is wrong: the sum is 3.", thinking="1 + 2 is 3, not 4.")
    fork = record.turn([_RESULT], sound, parent=first)
    other = record.choice(fork, spelled_answer(model, "The function is wrong."))
    emoji = _emoji_turn(model, record, fork)
    half = model.encode(f"Which function {EMOJI[3]}")[:-1]
    aborted = record.turn([user("Which one?")], cut_answer(model, half), parent=other)
    problem: dict[str, Any] = {"problem": Problem.USAGE_MISMATCH}
    refused = record.turn([user("Once more.")], answer(model, "It is 3."), parent=emoji, **problem)
    special = record.turn(
        [user("What does <|im_start|> mean, and <|endoftext|>?")],
        Answer({"role": "assistant", "content": model.decode(model.encode(_SPECIAL))}, _ids(model, _SPECIAL)),
        parent=refused,
    )
    subagent, subagent_end = _subagent_turns(model, record)
    broken = _broken_turn(model, record)
    after = record.turn([user("And now?")], answer(model, "Now it is right."), parent=broken)
    record.rewards |= {"": 0.75, emoji.id: 1.0, aborted.id: -0.5}
    shown = (first, fork, other, emoji, aborted, refused, special, subagent, subagent_end, broken, after)
    return SmallSession(record.recorded(), *shown)


def _ids(model: TinyModel, text: str) -> list[int]:
    return [*model.encode(text), END]


def _emoji_turn(model: TinyModel, record: SessionRecorder, parent: Turn) -> Turn:
    faces = answer(model, f"Done {EMOJI[0]} and {EMOJI[5]}{EMOJI[7]}!")
    versions = (WeightSpan("1", 0, 4), WeightSpan("2", 4, len(faces.ids)))
    return record.turn([user("Say it with faces.")], faces, parent=parent, weight_versions=versions)


def _subagent_turns(model: TinyModel, record: SessionRecorder) -> tuple[Turn, Turn]:
    agent: dict[str, Any] = {"request_class": RequestClass.SUBAGENT, "agent": "agent-1"}
    opening = [system("You search files."), user("Find every test of lists.")]
    calls = [tool_call("read_file", 2, path="tests")]
    first = record.turn(opening, answer(model, "", calls=calls), **agent)
    cut = cut_answer(model, model.encode("There are two of them: the first one is"), "length")
    return first, record.turn([tool_result("test_list.py test_lists.py", 2)], cut, parent=first, **agent)


def _broken_turn(model: TinyModel, record: SessionRecorder) -> Turn:
    """The history again, with its thinking dropped and the tool's result shortened by the client."""
    history = [
        *_OPENING,
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        tool_result("assert sum([1, 2]) == ..."),
        {"role": "assistant", "content": "The test is wrong: the sum is 3."},
        user("Repair the test."),
    ]
    return record.turn(history, answer(model, "I set it to 3."), reason=Reason.HISTORY_EDITED)
