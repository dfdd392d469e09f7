"""A session as the page reads it: its turns with their messages, and what explains each turn."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tokenproxy.record.store import Session
from tokenproxy.record.turn import Turn, request_time
from tokenproxy.record.vocabulary import Problem, Reason
from tokenproxy.samples.tree import TurnTree
from tokenproxy.samples.turn_json import shown_turns
from tokenproxy.viewer.breaks import Break, breaks_of
from tokenproxy.viewer.session_list import describe
from tokenproxy.viewer.summary import summary_of


def session_tree(
    session: Session, turns: Sequence[Turn], rewards: Mapping[str, float], since: float = 0.0
) -> dict[str, Any]:
    """The session, its rewards and agents, and the turns that were recorded at or after `since`.

    Args:
        turns: all turns of the session.
        rewards: by turn id; the session's by "".
        since: in seconds since the epoch.
    """
    tree, breaks = TurnTree(turns), breaks_of(turns)
    shown = (turn for turn in turns if turn.created >= since)
    return {
        "session": describe(session, rewards.get(""), summary_of(turns, breaks)),
        "rewards": {turn: reward for turn, reward in rewards.items() if turn},
        "meanings": _meanings(turns),
        **shown_turns(turns, shown, lambda turn: _explained(turn, tree, breaks)),
    }


def _explained(turn: Turn, tree: TurnTree, breaks: Mapping[str, Break]) -> dict[str, Any]:
    fault = tree.fault(turn)
    return {
        "started": request_time(turn.id) or None,
        "replica": turn.replica or None,
        "refused": {"turn": fault.turn, "reason": fault.reason} if fault else None,
        "weight_versions": list(dict.fromkeys(span.version for span in turn.weight_versions)),
        "logprobs_mode": turn.logprobs_mode or None,
        "break": breaks.get(turn.id),
        "logprob": _mean_logprob(turn),
        "images": len(turn.images),
    }


def _meanings(turns: Sequence[Turn]) -> dict[str, str]:
    """What the reasons and problems of turns mean, by their words."""
    words = {turn.reason for turn in turns} | {turn.problem for turn in turns}
    return {str(word): word.meaning for kind in (Reason, Problem) for word in kind if word in words}


def _mean_logprob(turn: Turn) -> float | None:
    """The mean of a turn's log-probabilities; None if there is none, or if one is not finite."""
    if not turn.logprobs or len(turn.logprobs) % 4:
        return None
    mean = float(np.frombuffer(turn.logprobs, "<f4").mean(dtype=np.float64))
    return mean if np.isfinite(mean) else None
