"""The session `small`: every kind of turn once."""

from dataclasses import dataclass
from typing import Any

from tests.support.talk import call, result, user
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
)
from tokenproxy.record.origin import RequestClass
from tokenproxy.record.turn import Turn, WeightSpan
from tokenproxy.record.vocabulary import Problem, Reason

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
_CALL = call("read_file", '{"path":"tests/test_list.py"}', "call_1")


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
    fork = record.turn([result(_CALL, "assert sum([1, 2]) == 4")], sound, parent=first)
    other = record.choice(fork, spelled_answer(model, "The function is wrong."))
    faces = answer(model, f"Done {EMOJI[0]} and {EMOJI[5]}{EMOJI[7]}!")
    versions = (WeightSpan("1", 0, 4), WeightSpan("2", 4, len(faces.ids)))
    emoji = record.turn([user("Say it with faces.")], faces, parent=fork, weight_versions=versions)
    half = cut_answer(model, model.encode(f"Which function {EMOJI[3]}")[:-1])
    aborted = record.turn([user("Which one?")], half, parent=other)
    it_is = answer(model, "It is 3.")
    refused = record.turn([user("Once more.")], it_is, parent=emoji, problem=Problem.USAGE_MISMATCH)
    ids = model.encode("It opens a message, and <|endoftext|> ends a text.")
    sampled = Answer({"role": "assistant", "content": model.decode(ids)}, [*ids, END])
    asked = user("What does <|im_start|> mean, and <|endoftext|>?")
    special = record.turn([asked], sampled, parent=refused)
    agent: dict[str, Any] = {"request_class": RequestClass.SUBAGENT, "agent": "agent-1"}
    opening = [system("You search files."), user("Find every test of lists.")]
    read = call("read_file", '{"path":"tests"}', "call_2")
    subagent = record.turn(opening, answer(model, "", calls=[read]), **agent)
    cut = cut_answer(model, model.encode("There are two of them: the first one is"), "length")
    found = [result(read, "test_list.py test_lists.py")]
    subagent_end = record.turn(found, cut, parent=subagent, **agent)
    # the client dropped the thinking and shortened the result of the tool
    history = [
        *_OPENING,
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        result(_CALL, "assert sum([1, 2]) == ..."),
        {"role": "assistant", "content": "The test is wrong: the sum is 3."},
        user("Repair the test."),
    ]
    broken = record.turn(history, answer(model, "I set it to 3."), reason=Reason.HISTORY_EDITED)
    after = record.turn([user("And now?")], answer(model, "Now it is right."), parent=broken)
    record.rewards |= {"": 0.75, emoji.id: 1.0, aborted.id: -0.5}
    shown = (first, fork, other, emoji, aborted, refused, special, subagent, subagent_end, broken, after)
    return SmallSession(record.recorded(), *shown)
