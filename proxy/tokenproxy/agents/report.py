"""What a session recorded, as a table for the terminal."""

from collections import Counter
from collections.abc import Collection
from typing import Any

from tokenproxy.client import SessionInfo, SessionSampleList

_FIRST_TURN = "first_turn"


def table(
    session: SessionInfo, samples: SessionSampleList, before: Collection[str], reward: float | None
) -> str:
    """The counts of a session as lines of text.

    Args:
        before: the ids of turns that were there before the command ran.
        reward: what the exit code gave; None if it gives none.
    """
    turns = session.turns
    sampled = sum(turn["completion_tokens"] for turn in turns)
    aborted = sum(turn["finish_reason"] == "abort" for turn in turns)
    new = sum(turn["id"] not in before for turn in turns)
    words = [f"{sampled} ids sampled"]
    words += [f"{new} turns are new"] if new != len(turns) else []
    words += [f"{aborted} aborted"] if aborted else []
    # rendered although they are no first turns
    rendered = Counter(
        turn["reason"] for turn in turns if not turn["parent"] and turn["reason"] not in (None, _FIRST_TURN)
    )
    children = Counter(turn["parent"] for turn in turns if turn["parent"])
    extended, again = children.total(), rendered.total()
    classes = Counter(turn.get("request_class") or "unknown" for turn in turns)
    refused = Counter(leaf["reason"] for leaf in samples.refused)
    trained = sum(sum(sample["loss_mask"]) for sample in samples.samples)
    rows: list[tuple[str, Any, str]] = [
        ("turns", len(turns), "; ".join(words)),
        ("exact", extended, f"of {extended + again} that continue a conversation"),
        ("  rendered", again, _counts(rendered)),
        ("roots", len(turns) - extended, f"conversations; {extended - len(children)} forks"),
        ("agents", len(session.agents), f"turns by class: {_counts(classes)}"),
        ("samples", len(samples.samples), f"{trained} ids to train on"),
        ("  refused", refused.total(), _counts(refused)),
    ]
    lines = [row for row in rows if row[1] or not row[0].startswith(" ")]
    if reward is not None:
        lines.append(("reward", f"{reward:g}", "from the exit code"))
    return "\n".join(f"  {name:<10} {value:>8}  {text}".rstrip() for name, value, text in lines)


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common())
