"""Trees of recorded turns become training samples, one for each leaf. Knows nothing of stores and trainers.

Law, for every sample:

    prompt_ids + completion_ids == prompt_ids(last turn) + completion_ids(last turn)
    len(completion_ids) == len(loss_mask) == len(logprobs)
    loss_mask[i] == 1   only if the model sampled completion_ids[i]
    logprobs[i] is None if and only if it did not

and for all samples of a rollout together: what the model sampled in sound turns is in one of them, and with
`shared="once"` its mask is 1 in exactly one. A turn is sound if its own evidence adds up and that of all the
turns it continues; the others are refused by name, never padded and never left out in silence.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from proxy.history.store import Session
from proxy.history.turn import Turn, WeightSpan, unpack_ids, unpack_logprobs

Shared = Literal["once", "each"]
"""Whether a turn that several samples share is trained in one of them or in each."""

WHOLE_ROLLOUT = ""
"""The key of a rollout's own reward among those of its turns."""


class TurnSpan(msgspec.Struct, frozen=True, kw_only=True):
    """The sampled ids of one turn: `completion_ids[start:end]` of its sample."""

    id: str
    start: int
    end: int
    trained: bool
    """Whether the mask is 1 on these ids; if not, it is in another sample."""
    source: str
    """`extended`, `rendered` or `given`: how the turn's prompt came about."""
    reason: str = ""
    """Why its prompt is not an extension of all that was said before; empty if it is."""
    finish_reason: str | None = None
    """As the engine said it; `abort` if the turn was broken off, with the ids sampled until then."""
    temperature: float | None = None
    """What the turn was sampled with, if the request or its session said so."""
    stop_reason: str | int | None = None
    """The stop string or token that ended the turn, as vLLM says it."""
    reward: float | None = None
    """The turn's own reward."""
    weight_versions: list[WeightSpan]
    """[version, start, end] in coordinates of `completion_ids`."""
    routed_experts: str | None = None
    """As the engine returned it for this turn (base64 of an .npy array); the rows are the engine's own."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One path from the first turn of a conversation to its last: p ids of prompt, c ids of completion."""

    rollout: str
    leaf: str
    """Id of the last turn."""
    index: int
    """Place among the samples of the rollout, from 0."""
    whole: bool
    """False if turns behind `leaf` were refused: the sample ends where the evidence does."""
    session: bool
    """Whether a client named the rollout with a session id."""
    model: str
    prompt_ids: list[int]
    """The whole prompt of the first turn; [p]."""
    completion_ids: list[int]
    """All ids behind it, sampled or appended; [c]."""
    loss_mask: list[int]
    """1 on sampled ids to train on, 0 on all others; [c]."""
    logprobs: list[float | None]
    """Log-probabilities (natural logarithm) of sampled ids, None on appended ones; [c]."""
    turns: list[TurnSpan]
    """In the order they were sampled; at least one."""
    finish_reason: str | None
    """Of the last turn."""
    reward: float | None
    """The last turn's own if it is set, else that of the whole rollout."""
    messages: list[Any]
    """The conversation, the first message of the first prompt first; the last is the model's."""
    tools: list[Any]
    template_kwargs: dict[str, Any]
    metadata: dict[str, Any]
    """The session's."""


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """A leaf that did not become a sample."""

    rollout: str
    leaf: str
    turn: str
    """The first turn of its path that cannot be trained on."""
    reason: str
    """Why: one of `proxy.history.evidence.PROBLEMS`."""


class Samples(msgspec.Struct, frozen=True):
    """What a rollout gave."""

    samples: list[Sample]
    refused: list[Refused]


def samples_of(
    turns: Sequence[Turn],
    rewards: Mapping[str, float],
    *,
    session: Session | None = None,
    shared: Shared = "once",
) -> Samples:
    """The samples of one rollout, in time linear in the ids they hold.

    There is one for each leaf whose path is sound, in the order of the leaves' ids, and behind those one for
    each longest sound beginning of a refused path that is not part of another sample. A shared turn is
    trained in the first sample that holds it.

    Args:
        turns: all turns of the rollout, in any order.
        rewards: by turn id, and that of the whole rollout by "".
        session: what is known of the rollout; None gives samples without metadata.
        shared: whether shared turns are trained once or in each sample.
    """
    tree = _Tree(turns)
    taken: set[str] = set()
    samples = []
    for index, last in enumerate(tree.ends()):
        path = tree.path(last)
        trained = {turn.id for turn in path if shared == "each" or turn.id not in taken}
        taken |= trained
        whole = not tree.children(last)
        samples.append(_sample(path, trained, rewards, session, index, whole))
    return Samples(samples, list(tree.refused()))


class _Tree:
    """The turns of a rollout, and for each the first fault of its path."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = {turn.id: turn for turn in sorted(turns, key=lambda turn: turn.id)}
        self._children: dict[str, list[Turn]] = {}
        for turn in self._turns.values():
            if turn.parent is not None:
                self._children.setdefault(turn.parent, []).append(turn)
        self._faults = self._find_faults()

    def _find_faults(self) -> dict[str, tuple[str, str] | None]:
        """For each turn the first of its path that is not fit to be trained on, and why."""
        faults: dict[str, tuple[str, str] | None] = {}
        reached = [turn for turn in self._turns.values() if self._parent(turn) is None]
        for turn in reached:  # grows: parents come before their children, whatever their ids say
            parent = self._parent(turn)
            inherited = faults[parent.id] if parent else None
            reason = "" if inherited else _fault(turn, parent)
            faults[turn.id] = (turn.id, reason) if reason else inherited
            reached += self.children(turn)
        return faults

    def _parent(self, turn: Turn) -> Turn | None:
        return None if turn.parent is None else self._turns.get(turn.parent)

    def children(self, turn: Turn) -> list[Turn]:
        """The turns that continue this one."""
        return self._children.get(turn.id, [])

    def path(self, turn: Turn) -> list[Turn]:
        """A turn and all it continues, the first one first."""
        path = [turn]
        while (parent := self._parent(path[-1])) is not None:
            path.append(parent)
        return path[::-1]

    def ends(self) -> list[Turn]:
        """Sound turns that no sound turn continues: first the leaves, then what is left of refused paths."""
        sound = {turn_id for turn_id, fault in self._faults.items() if fault is None}
        ends = [
            self._turns[turn_id]
            for turn_id in sorted(sound)
            if not any(child.id in sound for child in self.children(self._turns[turn_id]))
        ]
        return sorted(ends, key=lambda turn: bool(self.children(turn)))

    def refused(self) -> Iterator[Refused]:
        """The leaves with a fault on their path, in the order of their ids."""
        for turn in self._turns.values():
            if (fault := self._faults[turn.id]) and not self.children(turn):
                yield Refused(rollout=turn.rollout, leaf=turn.id, turn=fault[0], reason=fault[1])


def _fault(turn: Turn, parent: Turn | None) -> str:
    """Why this turn cannot be trained on, whatever it continues; empty if it can."""
    if turn.problem:
        return turn.problem
    if turn.parent is not None and parent is None:
        return "missing_parent"
    before = parent.prompt_tokens + parent.completion_tokens if parent else 0
    if before + len(turn.appended) // 4 != turn.prompt_tokens:
        return "prompt_length_mismatch"
    if turn.prompt_tokens == 0:
        return "no_prompt_ids"
    if not turn.completion:
        return "no_completion_ids"
    if not turn.logprobs:
        return "no_logprobs"
    if len(turn.logprobs) != len(turn.completion):
        return "logprobs_mismatch"
    return "" if all(map(math.isfinite, unpack_logprobs(turn.logprobs))) else "logprobs_not_finite"


def _sample(
    path: list[Turn],
    trained: set[str],
    rewards: Mapping[str, float],
    session: Session | None,
    index: int,
    whole: bool,
) -> Sample:
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float | None] = []
    spans: list[TurnSpan] = []
    for turn in path:
        if spans:
            appended = unpack_ids(turn.appended)
            ids += appended
            mask += [0] * len(appended)
            logprobs += [None] * len(appended)
        spans.append(_span(turn, len(ids), turn.id in trained, rewards.get(turn.id)))
        ids += unpack_ids(turn.completion)
        mask += [int(turn.id in trained)] * turn.completion_tokens
        logprobs += unpack_logprobs(turn.logprobs)
    last = path[-1]
    return Sample(
        rollout=last.rollout,
        leaf=last.id,
        index=index,
        whole=whole,
        session=session is not None and session.explicit,
        model=last.model,
        prompt_ids=unpack_ids(path[0].appended),
        completion_ids=ids,
        loss_mask=mask,
        logprobs=logprobs,
        turns=spans,
        finish_reason=last.finish_reason,
        reward=rewards.get(last.id, rewards.get(WHOLE_ROLLOUT)),
        messages=[message for turn in path for message in _messages(turn)],
        tools=msgspec.json.decode(_latest([turn.tools for turn in path]) or b"[]"),
        template_kwargs=msgspec.json.decode(_latest([turn.template_kwargs for turn in path]) or b"{}"),
        metadata=msgspec.json.decode(session.metadata) if session else {},
    )


def _span(turn: Turn, start: int, trained: bool, reward: float | None) -> TurnSpan:
    return TurnSpan(
        id=turn.id,
        start=start,
        end=start + turn.completion_tokens,
        trained=trained,
        source=turn.source,
        reason=turn.reason,
        finish_reason=turn.finish_reason,
        stop_reason=turn.stop_reason,
        temperature=turn.temperature,
        reward=reward,
        weight_versions=[
            WeightSpan(span.version, start + span.start, start + span.end) for span in turn.weight_versions
        ],
        routed_experts=turn.routed_experts,
    )


def _messages(turn: Turn) -> list[Any]:
    return [*msgspec.json.decode(turn.messages), msgspec.json.decode(turn.message)]


def _latest(values: Sequence[bytes]) -> bytes:
    """The last that is set: an empty one means the same as the turn before."""
    return next((value for value in reversed(values) if value), b"")
