"""What `append` may answer where the oracle has no expected ids.

A typed error is right. An answer is right if it is the one for a simpler conversation that the template
does print: with less history, without the call, or with a call for each result. It may also carry a note.
It is wrong if it breaks a law, and unchecked otherwise.
"""

import copy
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chat_tokenizer import Appended
from tests.support.templates.oracle import Oracle, Reason, Undecided
from tests.support.templates.sampling import ENDINGS, Sampled, Turn, applies
from tests.support.templates.shapes import ANSWER, Message, Shape, assistant, call
from tests.support.templates.verdicts import Finding, Kind, Verdict, broken_law, malformed

_NOT_APPENDED = (Reason.NEW_NOT_PRINTED, Reason.NEW_BEFORE_TURN, Reason.REORDERED)


@dataclass(frozen=True)
class Unshown:
    """A conversation whose rendering gives no expected ids."""

    oracle: Oracle
    shape: Shape
    reason: Reason
    turns: tuple[Turn, ...]
    """The turns of simpler conversations that can end in the same way."""
    ending: str
    kwargs: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        oracle: Oracle,
        shape: Shape,
        kwargs: Mapping[str, Any],
        ending: str,
        reason: Reason,
        other_stop: str,
    ) -> "Unshown":
        turns = []
        answered = [*shape.history[:-1], assistant(ANSWER)]
        called = [*shape.history[:-1], *_calls_of(shape.new)]
        for history in (_shortest(shape.history), answered, _shortest(answered), called):
            # the client declares the same tools, also where no message left in the history calls one
            simpler = replace(shape, history=history, tools_declared=shape.with_tools)
            try:
                turn = Turn(oracle, simpler, kwargs, oracle.turn_end(simpler, kwargs), other_stop)
                if applies(ending, turn):
                    ENDINGS[ending](turn)
                    turns.append(turn)
            except Undecided:
                continue
        return cls(oracle, shape, reason, tuple(turns), ending, kwargs)

    def sampled(self, stop: str, other_stop: str) -> Sampled:
        """The turn as the first simpler conversation shows it; otherwise, with the given stop tokens."""
        if self.turns:
            return replace(ENDINGS[self.ending](self.turns[0]), history=self.shape.history)
        text = json.dumps(self.shape.history[-1], ensure_ascii=False)
        if self.ending in ("own stop", "other stop"):
            token = other_stop if self.ending == "other stop" else stop
            return Sampled(self.shape.history, text + token, [], stop_token=token)
        if self.ending == "stop string":
            return Sampled(self.shape.history, text, [], stop_string=text[-3:])
        finish_reason = "abort" if self.ending.startswith("abort") else "length"
        return Sampled(self.shape.history, text, [], finish_reason)

    def prompt(self) -> list[int]:
        """The ids of the prompt, as the first simpler conversation shows it; none if there is none."""
        turn = self.turns[0] if self.turns else None
        return self.oracle.encode(self.oracle.prompt(turn.shape, turn.kwargs)) if turn else []

    def judge(self, ids: list[int], appended: Appended) -> Finding:
        """The verdict on an answer."""
        new_ids = appended.prompt_ids[len(ids) :]
        text = self.oracle.decode(new_ids)
        if error := malformed(appended, ids):
            return Finding(Verdict.WRONG, error, f"appended {text!r}")
        if law := broken_law(self.shape, text):
            return Finding(Verdict.WRONG, law, f"appended {text!r}; {self.reason}")
        expected = [ENDINGS[self.ending](turn).expected for turn in self.turns]
        if self._is_in(new_ids, expected) or appended.notes:
            return Finding(Verdict.EXCLUDED, self.reason)
        shown = [self.oracle.decode(ids) for ids in expected]
        detail = f"appended {text!r}; simpler conversations show {shown}"
        if self.reason in _NOT_APPENDED:
            return Finding(Verdict.WRONG, Kind.NOT_APPENDED, f"{detail}; {self.reason}")
        return Finding(Verdict.UNCHECKED, self.reason, detail)

    def _is_in(self, new_ids: list[int], expected: list[list[int]]) -> bool:
        if self.shape.kind == "call" and self.ending not in ("own stop", "other stop"):
            # whether the white space before the close is part of the call's syntax is not shown
            texts = {self.oracle.decode(ids).lstrip() for ids in expected}
            return self.oracle.decode(new_ids).lstrip() in texts
        return new_ids in expected


def _calls_of(new: Sequence[Message]) -> list[Message]:
    """A turn that the results at the beginning of new messages could answer."""
    results = itertools.takewhile(lambda message: message["role"] == "tool", new)
    calls = [{**call(1, "Oslo"), "id": result.get("tool_call_id", "call_1")} for result in results]
    return [assistant("", tool_calls=calls)] if calls else []


def _shortest(history: Sequence[Message]) -> list[Message]:
    """The last user message and the turn."""
    users = [message for message in history[:-1] if message["role"] == "user"]
    return copy.deepcopy([*users[-1:], history[-1]])
