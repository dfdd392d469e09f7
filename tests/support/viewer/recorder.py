"""Builds recorded sessions by hand, with the ids that a proxy would have recorded.

Law, for every turn with a parent, as in `tokenproxy.record.turn`:

    prompt_ids(turn) == prompt_ids(parent) + completion_ids(parent) + turn.appended

Prompts are plain transformers' rendering of the messages with the model's chat template. Everything follows
from the name and the start, so that each run records equal sessions.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tests.support.fake_wire import as_rendered, tools_as_rendered
from tests.support.talk import appended_after
from tests.support.tiny_model import END, TinyModel
from tokenproxy.record.cache import hash_ids
from tokenproxy.record.store import Session
from tokenproxy.record.turn import Turn, WeightSpan, pack_ids, pack_logprobs, turn_id, unpack_ids
from tokenproxy.record.vocabulary import ABORTED, Reason, Source

START = 1_780_000_000.0
"""When the first recorded session began, in seconds since the epoch: 28 May 2026, 20:26:40 UTC."""
MODEL = "tiny"
EMOJI = "😀😁😂😃😄😅😆😇😈😉😊😋😌😍😎😏"
"""Each is several ids, none of which is a character."""

Message = dict[str, Any]

_OF_A_REQUEST = (
    *("parent", "request", "messages", "appended", "tools", "template_kwargs", "prompt_tokens", "source"),
    "reason",
)
"""Fields of a turn that all choices of its request share."""


@dataclass
class Recorded:
    """A session with its turns, as a store takes them."""

    session: Session
    turns: list[Turn]
    rewards: dict[str, float] = field(default_factory=dict)
    """By turn id; the session's by ""."""


@dataclass(frozen=True)
class Answer:
    """What was sampled for a turn, and the message that the engine parsed it to."""

    message: Message
    ids: list[int]
    finish_reason: str = "stop"


def answer(model: TinyModel, content: str, *, thinking: str = "", calls: Sequence[Message] = ()) -> Answer:
    """An answer whose ids are those that the tokenizer gives its text."""
    text = f"<think>\n{thinking}\n</think>\n\n{content}" if thinking else content
    for call in calls:
        function = call["function"]
        name = msgspec.json.encode(function["name"]).decode()
        text += f'<tool_call>{{"name": {name}, "arguments": {function["arguments"]}}}</tool_call>'
    message: Message = {"role": "assistant", "content": content or None}
    if thinking:
        message["reasoning"] = thinking
    if calls:
        message["tool_calls"] = list(calls)
    return Answer(message, [*model.encode(text), END], "tool_calls" if calls else "stop")


def spelled_answer(model: TinyModel, content: str) -> Answer:
    """An answer sampled letter by letter: ids that the tokenizer would not give its text."""
    ids = [token for letter in content for token in model.encode(letter)]
    return Answer({"role": "assistant", "content": content}, [*ids, END])


def cut_answer(model: TinyModel, ids: Sequence[int], finish_reason: str = ABORTED) -> Answer:
    """An answer that ended before its stop token."""
    return Answer({"role": "assistant", "content": model.decode(list(ids))}, list(ids), finish_reason)


def system(content: str) -> Message:
    return {"role": "system", "content": content}


class SessionRecorder:
    """Records the turns of one session, each a few seconds after the one before."""

    def __init__(
        self,
        model: TinyModel,
        name: str,
        *,
        start: float = START,
        tools: Sequence[Message] = (),
        metadata: Message | None = None,
    ) -> None:
        self.name = name
        self.turns: dict[str, Turn] = {}
        self.rewards: dict[str, float] = {}
        self._model = model
        self._random = random.Random(f"{name} 0")
        self._start = self._now = start
        self._tools = list(tools)
        self._metadata = metadata or {}
        self._hashes: dict[str, Any] = {}

    def turn(
        self,
        new: Sequence[Message],
        sampled: Answer,
        *,
        parent: Turn | None = None,
        **fields: Any,
    ) -> Turn:
        """Record a turn.

        Args:
            new: the messages after the parent's conversation; the whole conversation if there is no parent.
            fields: of `Turn`, in place of the usual ones.
        """
        if parent is None:
            tools = tools_as_rendered(self._tools) if self._tools else None
            appended = self._model.render(as_rendered(list(new)), tools=tools)
        else:
            appended = appended_after(self._model, unpack_ids(parent.completion), list(new))
        began, self._now = self._now, self._now + self._random.uniform(0.5, 6.0)
        request = f"{round(began * 1e9):016x}{self._random.getrandbits(48):012x}0000"
        before = parent.prompt_tokens + parent.completion_tokens if parent else 0
        usual = {
            "id": request,
            "parent": parent.id if parent else None,
            "request": request,
            "tools": None if parent else (msgspec.json.encode(self._tools) if self._tools else b""),
            "template_kwargs": None if parent else b"",
            "messages": msgspec.json.encode(list(new)),
            "appended": pack_ids(appended),
            "prompt_tokens": before + len(appended),
            "source": Source.EXTENDED if parent else Source.RENDERED,
            "reason": "" if parent else Reason.FIRST_TURN,
        }
        return self._keep(parent, sampled, {**usual, **fields})

    def choice(self, holder: Turn, sampled: Answer) -> Turn:
        """Record another choice of the request of a turn, which holds the prompt of both."""
        index = sum(turn.request == holder.request for turn in self.turns.values())
        shared = {name: getattr(holder, name) for name in _OF_A_REQUEST}
        parent = self.turns[holder.parent] if holder.parent else None
        own = {"id": turn_id(holder.request, index), "choice": index, "prompt_turn": holder.id}
        return self._keep(parent, sampled, {**shared, **own})

    def recorded(self) -> Recorded:
        """The session with all turns so far."""
        session = Session(
            id=self.name,
            created=self._start,
            used=self._now,
            metadata=msgspec.json.encode(self._metadata),
        )
        return Recorded(session, list(self.turns.values()), dict(self.rewards))

    def _keep(self, parent: Turn | None, sampled: Answer, fields: dict[str, Any]) -> Turn:
        completion = pack_ids(sampled.ids)
        hasher = self._hashes[parent.id].copy() if parent else hash_ids(None)
        hasher.update(fields["appended"] + completion)
        usual = {
            "rollout": self.name,
            "created": self._now,
            "model": MODEL,
            "replica": "http://127.0.0.1:8001",
            "message": msgspec.json.encode(sampled.message),
            "completion": completion,
            "logprobs": pack_logprobs([-self._random.expovariate(2.0) for _ in sampled.ids]),
            "logprobs_mode": "raw_logprobs",
            "finish_reason": sampled.finish_reason,
            "stop_reason": None,
            "temperature": 1.0,
            "weight_versions": (WeightSpan("1", 0, len(sampled.ids)),),
            "ids_digest": hasher.digest(),
        }
        turn = Turn(**{**usual, **fields})
        self._hashes[turn.id] = hasher
        self.turns[turn.id] = turn
        return turn
