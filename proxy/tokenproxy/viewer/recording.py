"""Sessions as the data of a page that is one file: what the page would else read from a server."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

import msgspec

from chat_tokenizer import ChatTokenizer
from tokenproxy.record.store import Session
from tokenproxy.record.turn import Turn
from tokenproxy.samples.tree import TurnTree, path_of
from tokenproxy.viewer.breaks import breaks_of
from tokenproxy.viewer.drift import Basis, drift_lane
from tokenproxy.viewer.folds import fold_table
from tokenproxy.viewer.summary import Summary
from tokenproxy.viewer.tokens import encode_tokens
from tokenproxy.viewer.tree import session_tree

Leaf = tuple[bytes, Sequence[Any]]
"""What belongs to one path: the body of `encode_tokens`, and its comparisons."""


@dataclass(frozen=True, slots=True)
class RecordedSession:
    """A session with its turns."""

    session: Session
    turns: Sequence[Turn]
    rewards: Mapping[str, float] = field(default_factory=dict)
    """By turn id; the session's by ""."""
    untrained: frozenset[str] = frozenset()
    """Ids of turns that could be trained on, and are not: those of other classes than an export selects."""


class PageData(msgspec.Struct):
    """The data of a page."""

    sessions: list[Any] = []
    """The rows of the list."""
    trees: dict[str, Any] = {}
    """By session."""
    tokens: dict[str, str] = {}
    """Bodies of `encode_tokens` as base64, by `SESSION/TURN`, for the last turn of each path."""
    drift: dict[str, list[Any]] = {}
    """Comparisons by `SESSION/TURN`; the first is shown unless another is chosen."""
    folds: dict[str, Any] = {}
    """As `fold_table` returns them, by the key."""

    def add(self, name: str, tree: Any, leaves: Mapping[str, Leaf]) -> None:
        """Add a session.

        Args:
            tree: as `session_tree` returns it.
            leaves: by the ids of the turns that no turn continues, or whose prompts broke.
        """
        name = self._unused(name)
        session = {**tree["session"], "id": name}
        self.sessions.append(session)
        self.trees[name] = {**tree, "session": session}
        for leaf, (tokens, lanes) in leaves.items():
            self.tokens[f"{name}/{leaf}"] = base64.b64encode(tokens).decode()
            self.drift[f"{name}/{leaf}"] = list(lanes)

    def fold(self) -> None:
        """Fold the sessions by each key of their metadata."""
        rows = msgspec.json.decode(msgspec.json.encode(self.sessions), type=list[dict[str, Any]])
        summaries = {row["id"]: msgspec.convert(row["summary"], Summary) for row in rows}
        sessions = [
            Session(
                id=row["id"],
                created=row["created"],
                metadata=msgspec.json.encode(row["metadata"]),
                rewards={} if row["reward"] is None else {"": row["reward"]},
            )
            for row in rows
        ]
        keys = fold_table(sessions, summaries, "")["keys"]
        self.folds = {key: fold_table(sessions, summaries, key) for key in keys}

    def _unused(self, name: str) -> str:
        """A name that no session of the page has: sessions of two tenants may have one name."""
        numbers = (f"{name}~{number}" for number in count(2))
        return next(each for each in chain([name], numbers) if each not in self.trees)


def add_recording(
    page: PageData, recording: RecordedSession, tokenizer: ChatTokenizer | None, note: str
) -> None:
    """Add a session whose turns are at hand.

    Args:
        note: why there is no tokenizer, or why its texts may be wrong.
    """
    turns = recording.turns
    by_id, tree, breaks = {turn.id: turn for turn in turns}, TurnTree(turns), breaks_of(turns)
    leaves: dict[str, Leaf] = {}
    for leaf in (turn for turn in turns if tree.is_leaf(turn) or turn.id in breaks):
        path = path_of(leaf, by_id)
        bases = [Basis.BEFORE, Basis.TEMPLATE] if leaf.id in breaks else [Basis.TEMPLATE]
        lanes = [drift_lane(turns, path, basis, tokenizer, note) for basis in bases]
        leaves[leaf.id] = encode_tokens(path, tree, tokenizer, note, recording.untrained), lanes
    page.add(recording.session.name, session_tree(recording.session, turns, recording.rewards), leaves)
