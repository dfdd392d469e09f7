"""Converts trees of recorded turns into samples, one for each leaf. Independent of stores and trainers.

Law, for every sample:

    prompt_ids + completion_ids == prompt_ids(last turn) + completion_ids(last turn)
    len(completion_ids) == len(loss_mask) == len(logprobs)
    loss_mask[i] == 1   only if the model sampled completion_ids[i]
    logprobs[i] is None if and only if it did not

and for all samples of a rollout together: each id that the model sampled in a sound turn is in a sample, and
with `shared="once"` its mask is 1 in exactly one of them. A turn is sound if it and all turns that it
continues can be trained on. The leaf of a path with an unsound turn is refused with a reason: no sample is
padded, and no leaf is left out silently.

If classes of turns or turns on policy are selected, this holds for the selected turns. The turns that they
continue are in the samples too, with a mask of 0; turns that no selected one continues are left out.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from tokenproxy.base.evidence import RECORDED, with_facts
from tokenproxy.record.store import Session
from tokenproxy.record.turn import Segment, Turn, WeightSpan, unpack_ids, unpack_logprobs
from tokenproxy.samples.chains import links_of
from tokenproxy.samples.classes import UNKNOWN, classes_of, selected
from tokenproxy.samples.tree import TurnTree, last_request, parsed

Shared = Literal["once", "each"]
"""Whether a turn that several samples share is trained in one of them or in each."""
SHARED: Mapping[str, Shared] = {"once": "once", "each": "each"}
"""The values by the words of requests."""

WHOLE_ROLLOUT = ""
"""The key of the whole rollout's reward in a mapping of rewards by turn id."""


class Selection(NamedTuple):
    """What of a rollout is trained on."""

    shared: Shared = "once"
    classes: frozenset[str] = frozenset()
    """The classes of turns, `UNKNOWN` for those without one; empty for all."""
    on_policy: bool = False
    """Whether only turns without `off_policy` are."""

    def holds(self, turn: Turn, request_class: str) -> bool:
        """Whether a turn of a class is trained on."""
        wanted = not self.classes or (request_class or UNKNOWN) in self.classes
        return wanted and not (self.on_policy and turn.off_policy)


EVERYTHING = Selection()


class TurnSpan(msgspec.Struct, frozen=True, kw_only=True):
    """The sampled ids of one turn: `completion_ids[start:end]` of its sample."""

    id: str
    start: int
    end: int
    trained: bool
    """Whether the mask is 1 on these ids; if not, it is 1 in another sample."""
    source: str
    """A `Source`: where the turn's prompt came from."""
    reason: str = ""
    """A `Reason`: why the prompt does not extend the whole recorded history; empty if it does."""
    finish_reason: str | None = None
    """The engine's finish reason; `abort` if the turn was broken off, with the ids sampled until then."""
    temperature: float | None = None
    """The temperature of the request or its session; None for the engine's default."""
    off_policy: tuple[str, ...] = ()
    """As `Turn.off_policy`."""
    after_finish: bool = False
    """As `Turn.after_finish`."""
    stop_reason: str | int | None = None
    """The stop string or token that ended the turn, as vLLM reports it."""
    reward: float | None = None
    """The turn's own reward."""
    message_index: int | None = None
    """Index of what it sampled in the sample's `messages`; None if these cannot be read."""
    logprobs_mode: str = ""
    """The server's `--logprobs-mode`; empty if unknown."""
    logprobs_without: tuple[str, ...] = ()
    """As `Turn.logprobs_without`."""
    weight_versions: list[WeightSpan]
    """[version, start, end] in coordinates of `completion_ids`."""
    weights_uncertain: bool = False
    """As `Turn.weights_uncertain`."""
    segments: list[Segment] = []
    """Of a turn that was resumed: where its ids were sampled, in coordinates of `completion_ids`."""
    began_anew: tuple[str, ...] = ()
    """As `Turn.began_anew`."""
    routed_experts_start: int = 0
    """The position in the turn's prompt of the id that the first row of `routed_experts` belongs to."""
    request_class: str = ""
    """What the client sent the request for: see `tokenproxy.samples.classes`. Empty if unknown."""
    agent: str = ""
    """The client's id of the agent that sent it; empty for the first agent of a session, or if unknown."""
    parent_agent: str = ""
    """The agent that started that one; empty for the first agent of a session, or if unknown."""
    requested_model: str = ""
    """The client's name for the model, if that is another one than the model's own."""


if TYPE_CHECKING:
    TellingSpan = TurnSpan
else:
    TellingSpan = with_facts(TurnSpan, RECORDED, lambda fact: fact.kind | None, None)
    """A span with the facts of `EVIDENCE`, each by its name; null for what the engine did not report."""


UNCHANGED = (
    *("source", "reason", "finish_reason", "stop_reason", "temperature", "logprobs_mode"),
    *("logprobs_without", "weights_uncertain", "routed_experts_start"),
    *("agent", "parent_agent", "requested_model", "began_anew", "off_policy", "after_finish"),
)
"""The fields of a turn that its span holds as they are."""


class SampleImage(msgspec.Struct, frozen=True):
    """An image in the ids of a sample."""

    digest: str
    """32 hexadecimal digits; `messages` name the image `image:DIGEST`."""
    offset: int
    """Index of its first id in `prompt_ids + completion_ids`."""
    length: int
    """Number of its ids."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One path from the first turn of a conversation to its last: p ids of prompt, c ids of completion.

    Fields of stored JSON (`messages`, `tools`, `template_kwargs`, `metadata`) are None if it cannot be read.
    """

    rollout: str
    """The session's name, as its client knows it."""
    tenant: str
    """Digest of the credential of the rollout's tenant; empty where no credentials are required."""
    leaf: str
    """Id of the last turn."""
    index: int
    """Position among the samples of the rollout, from 0."""
    whole: bool
    """False if turns after `leaf` were refused: the sample ends at the last sound turn."""
    session: bool
    """Whether a client named the rollout with a session id."""
    ambiguous: bool
    """Whether another rollout held an equal conversation, so that requests may have been confused."""
    model: str
    """Of the last turn."""
    prompt_ids: list[int]
    """The whole prompt of the first turn; [p]."""
    completion_ids: list[int]
    """All ids after it, sampled or appended; [c]."""
    loss_mask: list[int]
    """1 on sampled ids to train on, 0 on all others; [c]."""
    logprobs: list[float | None]
    """Log-probabilities (natural logarithm) of sampled ids, None on appended ones; [c]."""
    logprobs_mode: str
    """The `logprobs_mode` of all turns; empty if it is unknown, or if the turns differ: see theirs."""
    turns: list[TellingSpan]
    """In the order they were sampled; at least one."""
    finish_reason: str | None
    """Of the last turn."""
    reward: float | None
    """The last turn's own if it has one, else that of the whole rollout."""
    messages: list[Any] | None
    """The conversation from the first message of the first prompt to the model's last."""
    tools: list[Any] | None
    """Of the last request."""
    template_kwargs: dict[str, Any] | None
    """The chat template's arguments of the last request."""
    metadata: dict[str, Any] | None
    """The session's."""
    images: list[SampleImage]
    """In the order of the ids."""
    image_data: dict[str, str]
    """Data URLs by digest: of those images that no earlier sample of the rollout holds."""
    revision: int = 0
    """`Session.revision`; 0 for samples that were not read from the feed."""
    request_class: str = ""
    """Of the last turn."""
    agent: str = ""
    """Of the last turn."""
    parent_agent: str = ""
    """The agent that started that of the last turn; empty for the first agent of a session, or if unknown."""
    continues: str = ""
    """The turn that caused this conversation, as its summary: see `tokenproxy.samples.chains`. Empty if it
    begins a chain."""
    segment: int = 0
    """Position in the chain."""
    turns_after_finish: int = 0
    """Number of its turns with `after_finish`."""


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """A leaf that did not become a sample."""

    rollout: str
    """The session's name, as its client knows it."""
    leaf: str
    turn: str
    """The first turn of the leaf's path that cannot be trained on."""
    reason: str
    """The `Problem` of that turn."""


class Samples(msgspec.Struct, frozen=True):
    """The samples of a rollout, and the leaves that gave none."""

    samples: list[Sample]
    refused: list[Refused]


def samples_of(
    turns: Sequence[Turn],
    rewards: Mapping[str, float],
    *,
    session: Session | None = None,
    selection: Selection = EVERYTHING,
    revision: int = 0,
) -> Samples:
    """The samples of one rollout, in time linear in the ids they hold.

    The first samples are those of the leaves whose paths are sound, in the order of the leaves' ids. Then
    follows one for the longest sound beginning of each refused path, unless it is part of another sample.
    `_preference` decides which of the samples that share a turn trains it.

    Args:
        turns: all turns of the rollout, in any order.
        rewards: by turn id; the whole rollout's by WHOLE_ROLLOUT. Those that are not finite are ignored.
        session: the rollout's description. Without it, the samples lack the fields of a session, and
            `rollout` is the id in the store.
        selection: turns that it does not hold, after the last one of a path that it holds, are left out.
        revision: that of all samples.
    """
    rewards = {turn_id: reward for turn_id, reward in rewards.items() if math.isfinite(reward)}
    rollout = _Rollout(turns, rewards, session, revision)
    trainable = {turn.id for turn in turns if selection.holds(turn, rollout.classes[turn.id])}
    tree = TurnTree(selected(turns, trainable))
    paths = [path for path in tree.sound_paths() if any(turn.id in trainable for turn in path)]
    leaf_of = _leaf_that_trains(sorted(paths, key=lambda path: _preference(path[-1], tree, rewards)))
    samples: list[Sample] = []
    for path in paths:
        leaf, each = path[-1], selection.shared == "each"
        trained = {turn.id for turn in path if turn.id in trainable and (each or leaf_of[turn.id] == leaf.id)}
        samples.append(rollout.sample(path, trained, len(samples), whole=tree.is_leaf(leaf)))
    refused = [
        Refused(rollout=rollout.name_of(leaf), leaf=leaf.id, turn=fault.turn, reason=fault.reason)
        for leaf, fault in tree.faulty_leaves()
    ]
    return Samples(samples, refused)


def _preference(leaf: Turn, tree: TurnTree, rewards: Mapping[str, float]) -> tuple[object, ...]:
    """Sort key of leaves: of those that share a turn, the first trains it.

    Aborted leaves come last: trainers often drop such samples, and the shared turns with them. Otherwise
    leaves with a reward of their own come first (the rollout's reward does not tell leaves apart), then those
    with nothing refused after them, then those with more ids, then older ones.
    """
    ids = leaf.prompt_tokens + leaf.completion_tokens
    return leaf.aborted, leaf.id not in rewards, not tree.is_leaf(leaf), -ids, leaf.id


def _leaf_that_trains(paths: Iterable[Sequence[Turn]]) -> dict[str, str]:
    """For each turn the last turn of the first path that holds it."""
    leaf_of: dict[str, str] = {}
    for path in paths:
        for turn in path:
            leaf_of.setdefault(turn.id, path[-1].id)
    return leaf_of


class _Joined(NamedTuple):
    """The ids of a path after its first prompt, with what belongs to each."""

    ids: list[int]
    mask: list[int]
    logprobs: list[float | None]
    spans: list[TurnSpan]


class _Rollout:
    """What the samples of one rollout share."""

    def __init__(
        self, turns: Sequence[Turn], rewards: Mapping[str, float], session: Session | None, revision: int
    ) -> None:
        """Arguments are those of `samples_of`."""
        self.classes = classes_of(turns)
        self._links = links_of(turns, self.classes)
        self._rewards = rewards
        self._session = session
        self._revision = revision
        self._delivered: set[str] = set()
        """Digests of the images that earlier samples hold."""

    def name_of(self, turn: Turn) -> str:
        """The name of the rollout, given one of its turns."""
        return self._session.name if self._session else turn.rollout

    def sample(self, path: Sequence[Turn], trained: set[str], index: int, *, whole: bool) -> Sample:
        """The sample of a path. `trained`: ids of the turns whose mask is 1."""
        session, rewards = self._session, self._rewards
        messages, answers, tools, template_kwargs = last_request(path)
        joined = self._join(path, trained, answers)
        images = [image for turn in path for image in turn.images]
        image_data = {
            image.digest: image.image.url for image in images if image.digest not in self._delivered
        }
        self._delivered.update(image_data)
        last, link = path[-1], self._links[path[0].id]
        modes = {turn.logprobs_mode for turn in path}
        return Sample(
            rollout=self.name_of(last),
            tenant=session.tenant if session else "",
            leaf=last.id,
            index=index,
            whole=whole,
            session=session is not None and session.explicit,
            ambiguous=session is not None and session.ambiguous,
            model=last.model,
            prompt_ids=unpack_ids(path[0].appended),
            completion_ids=joined.ids,
            loss_mask=joined.mask,
            logprobs=joined.logprobs,
            logprobs_mode=modes.pop() if len(modes) == 1 else "",
            turns=joined.spans,
            finish_reason=last.finish_reason,
            reward=rewards.get(last.id, rewards.get(WHOLE_ROLLOUT)),
            messages=messages,
            tools=tools,
            template_kwargs=template_kwargs,
            metadata=parsed(session.metadata, dict) if session else {},
            images=[SampleImage(image.digest, image.offset, image.length) for image in images],
            image_data=image_data,
            revision=self._revision,
            request_class=self.classes[last.id],
            agent=last.agent,
            parent_agent=last.parent_agent,
            continues=link.continues,
            segment=link.number,
            turns_after_finish=sum(turn.after_finish for turn in path),
        )

    def _join(self, path: Sequence[Turn], trained: set[str], answers: Sequence[int]) -> _Joined:
        """Join the turns of a path. `answers` are those of `last_request`."""
        ids, mask, logprobs, spans = joined = _Joined([], [], [], [])
        for turn, answer in zip_longest(path, answers):
            if spans:  # what the first turn appended is the sample's prompt
                appended = unpack_ids(turn.appended)
                ids.extend(appended)
                mask.extend([0] * len(appended))
                logprobs.extend([None] * len(appended))
            spans.append(self._span(turn, len(ids), answer, trained=turn.id in trained))
            ids.extend(unpack_ids(turn.completion))
            mask.extend([int(turn.id in trained)] * turn.completion_tokens)
            logprobs.extend(unpack_logprobs(turn.logprobs))
        return joined

    def _span(self, turn: Turn, start: int, answer: int | None, *, trained: bool) -> TurnSpan:
        return TellingSpan(
            id=turn.id,
            start=start,
            end=start + turn.completion_tokens,
            trained=trained,
            reward=self._rewards.get(turn.id),
            message_index=answer,
            weight_versions=[
                WeightSpan(span.version, start + span.start, start + span.end)
                for span in turn.weight_versions
            ],
            segments=[
                replace(each, start=start + each.start, end=start + each.end) for each in turn.segments
            ],
            request_class=self.classes[turn.id],
            **{name: getattr(turn, name) for name in UNCHANGED},
            **{fact.name: fact.unpack(getattr(turn, fact.name, None)) for fact in RECORDED},
        )
