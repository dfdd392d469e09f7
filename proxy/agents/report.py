"""What a session recorded, as a table for the terminal."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from proxy.client import SessionInfo, SessionSampleList

_FIRST_TURN = "first_turn"


@dataclass(slots=True)
class Recorded:
    """The counts of a session."""

    turns: int = 0
    new: int = 0
    """Turns that were not there before the command ran."""
    extended: int = 0
    """Turns whose prompts continue the ids of another turn."""
    rendered: Counter[str] = field(default_factory=Counter)
    """Turns whose prompts the engine rendered although they were not first turns, by reason."""
    roots: int = 0
    forks: int = 0
    """Branches beyond the first, of all turns."""
    aborted: int = 0
    sampled_ids: int = 0
    classes: Counter[str] = field(default_factory=Counter)
    agents: int = 0
    samples: int = 0
    trained_ids: int = 0
    refused: Counter[str] = field(default_factory=Counter)


def counted(session: SessionInfo, samples: SessionSampleList, before: Collection[str]) -> Recorded:
    """Count what a session holds.

    Args:
        before: the ids of turns that were there before.
    """
    turns = session.turns
    children = Counter(turn["parent"] for turn in turns if turn["parent"])
    return Recorded(
        turns=len(turns),
        new=sum(turn["id"] not in before for turn in turns),
        extended=sum(turn["parent"] is not None for turn in turns),
        rendered=Counter(
            turn["reason"]
            for turn in turns
            if not turn["parent"] and turn["reason"] not in (None, _FIRST_TURN)
        ),
        roots=sum(turn["parent"] is None for turn in turns),
        forks=sum(count - 1 for count in children.values()),
        aborted=sum(turn["finish_reason"] == "abort" for turn in turns),
        sampled_ids=sum(turn["completion_tokens"] for turn in turns),
        classes=Counter(turn.get("request_class") or "unknown" for turn in turns),
        agents=len(session.agents),
        samples=len(samples.samples),
        trained_ids=sum(sum(sample["loss_mask"]) for sample in samples.samples),
        refused=Counter(refused["reason"] for refused in samples.refused),
    )


def table(recorded: Recorded, reward: float | None) -> str:
    """The counts as lines of text."""
    again = recorded.rendered.total()
    rows: list[tuple[str, Any, str]] = [
        ("turns", recorded.turns, _turns(recorded)),
        ("exact", recorded.extended, f"of {recorded.extended + again} that continue a conversation"),
    ]
    if again:
        rows.append(("  rendered", again, _counts(recorded.rendered)))
    rows += [
        ("roots", recorded.roots, f"conversations; {recorded.forks} forks"),
        ("agents", recorded.agents, f"turns by class: {_counts(recorded.classes)}"),
        ("samples", recorded.samples, f"{recorded.trained_ids} ids to train on"),
    ]
    if recorded.refused:
        rows.append(("  refused", recorded.refused.total(), _counts(recorded.refused)))
    if reward is not None:
        rows.append(("reward", f"{reward:g}", "from the exit code"))
    return "\n".join(f"  {name:<10} {value:>8}  {words}".rstrip() for name, value, words in rows)


def _turns(recorded: Recorded) -> str:
    words = [f"{recorded.sampled_ids} ids sampled"]
    if recorded.new != recorded.turns:
        words.append(f"{recorded.new} turns are new")
    if recorded.aborted:
        words.append(f"{recorded.aborted} aborted")
    return "; ".join(words)


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common())
