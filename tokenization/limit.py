"""Limits of tokenising a text."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from tokenization.errors import TokenizationError


class TooManyIds(TokenizationError):
    """A text has more ids than allowed."""

    def __init__(self, count: int, max_ids: int, *, at_least: bool) -> None:
        super().__init__(f"{'at least ' if at_least else ''}{count} ids, of at most {max_ids}")
        self.count = count
        self.max_ids = max_ids
        self.at_least = at_least
        """Whether the text was not tokenised completely, so that it may have more than `count`."""


class Stopped(Exception):
    """The caller no longer waits for the ids."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Ends the tokenising of a text early."""

    max_ids: int | None = None
    """None for no limit."""
    stopped: Callable[[], bool] = bool
    """Returns whether the caller no longer waits; called between the pieces of a long text."""

    def plus(self, more: int) -> "Limit":
        """The limit for a text with `more` ids of context, which do not count."""
        return self if self.max_ids is None else replace(self, max_ids=self.max_ids + more)

    def check(self, count: int, *, at_least: bool = False) -> None:
        """Raise TooManyIds if `count` is over the limit, and Stopped if the caller no longer waits."""
        if self.stopped():
            raise Stopped
        if self.max_ids is not None and count > self.max_ids:
            raise TooManyIds(count, self.max_ids, at_least=at_least)


NO_LIMIT = Limit()
