"""Sessions as the data of a page that is one file: what the page would else read from a server."""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

import msgspec

from proxy.history.store import Session
from proxy.history.turn import Turn
from proxy.samples.tree import TurnTree, path_of
from proxy.viewer.breaks import breaks_of
from proxy.viewer.drift import Basis, drift_lane
from proxy.viewer.tokens import encode_tokens
from proxy.viewer.tree import session_tree
from tokenization import ChatTokenizer


@dataclass(frozen=True, slots=True)
class Recording:
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

    def add(self, name: str, tree: Any, leaves: Sequence[str], read: "Callable[[str], LeafData]") -> None:
        """Add a session.

        Args:
            tree: as `session_tree` returns it.
            leaves: ids of the turns that no turn continues.
            read: returns the data for one of them.
        """
        name = self._unused(name)
        session = {**tree["session"], "id": name}
        self.sessions.append(session)
        self.trees[name] = {**tree, "session": session}
        for leaf in leaves:
            data = read(leaf)
            self.tokens[f"{name}/{leaf}"] = base64.b64encode(data.tokens).decode()
            self.drift[f"{name}/{leaf}"] = list(data.lanes)

    def _unused(self, name: str) -> str:
        """A name that no session of the page has: sessions of two tenants may have one name."""
        numbers = (f"{name}~{number}" for number in count(2))
        return next(each for each in chain([name], numbers) if each not in self.trees)


@dataclass(frozen=True, slots=True)
class LeafData:
    """What belongs to one path."""

    tokens: bytes
    lanes: Sequence[Any]


def add_recording(page: PageData, recording: Recording, tokenizer: ChatTokenizer | None, note: str) -> None:
    """Add a session whose turns are at hand.

    Args:
        note: why there is no tokenizer, or why its texts may be wrong.
    """
    turns = recording.turns
    by_id, tree, breaks = {turn.id: turn for turn in turns}, TurnTree(turns), breaks_of(turns)

    def read(leaf: str) -> LeafData:
        path = path_of(by_id[leaf], by_id)
        bases = [Basis.BEFORE, Basis.TEMPLATE] if leaf in breaks else [Basis.TEMPLATE]
        lanes = [drift_lane(turns, path, basis, tokenizer, note) for basis in bases]
        return LeafData(encode_tokens(path, tree, tokenizer, note, recording.untrained), lanes)

    leaves = [turn.id for turn in turns if tree.is_leaf(turn)]
    page.add(recording.session.name, session_tree(recording.session, turns, recording.rewards), leaves, read)
