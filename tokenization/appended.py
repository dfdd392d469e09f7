"""The result of an append. Its list of all ids is built when it is first read.

Copying the ids given to `append` is its only step that takes longer after a longer history: after 128k ids,
ten times as long as the rest of a cached append. Callers that keep the ids themselves read only the new ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple

from tokenization.errors import InvalidIds


def checked_last_id(prompt_ids: Sequence[int]) -> int:
    """The last id of a prompt. The other ids, which may be 100k, are not checked.

    Raises:
        InvalidIds: the prompt is empty, or its last element is not an id.
    """
    if len(prompt_ids) == 0:
        raise InvalidIds("must not be empty")
    if not isinstance(prompt_ids[-1], Integral) or prompt_ids[-1] < 0:
        raise InvalidIds(f"must hold non-negative integers, not {prompt_ids[-1]!r}")
    return prompt_ids[-1]


class Unjoined(NamedTuple):
    """A prompt whose parts are not joined yet."""

    given: Sequence[int]
    """The ids given to `append`: the caller's own sequence, not a copy."""
    length: int
    """Number of the given ids at the time of the append. Ids that the caller adds later are left out."""
    more: tuple[int, ...]
    """The ids after them."""

    def join(self) -> list[int]:
        """The whole prompt. Raises InvalidIds if the given sequence is shorter than it was."""
        if len(self.given) < self.length:
            raise InvalidIds(
                "were shortened after the append: read `Appended.prompt_ids` before, or pass a copy"
            )
        given = self.given if len(self.given) == self.length else self.given[: self.length]
        return [*given, *self.more]


class _JoinedWhenRead:
    """The descriptor of `Appended.prompt_ids`: accepts a list or its parts, and joins these once."""

    def __get__(self, appended: "Appended | None", owner: type) -> list[int]:
        if appended is None:
            # dataclasses read the class attribute as the field's default: there is none
            raise AttributeError("prompt_ids")
        value: list[int] | Unjoined = vars(appended)["prompt_ids"]
        if isinstance(value, Unjoined):
            value = vars(appended)["prompt_ids"] = value.join()
        return value

    def __set__(self, appended: "Appended", value: list[int] | Unjoined) -> None:
        vars(appended)["prompt_ids"] = value


@dataclass(frozen=True)
class Appended:
    """The next prompt of a conversation."""

    # dataclasses support descriptors as fields without a default; mypy takes this one for a default
    prompt_ids: _JoinedWhenRead = _JoinedWhenRead()
    """The whole next prompt: the ids given, then `close_ids`, then `suffix_ids`. A list.

    The list is built when it is first read. Until then, do not change or remove any of the ids given to
    `append`; adding ids to that list is allowed. Example: `ids += appended.suffix_ids` is safe, `ids[:] = []`
    is not.
    """
    close_ids: list[int]  # type: ignore[misc]
    """Ids inserted to close the turn because the model did not sample them; empty if it did."""
    suffix_ids: list[int]  # type: ignore[misc]
    """Ids of separators, new messages and generation prompt."""
    notes: tuple[str, ...] = ()
    """Where the template would print the sampled turn differently: see `tokenization.notes`."""


def append_ids(
    prompt_ids: Sequence[int],
    close_ids: tuple[int, ...],
    suffix_ids: tuple[int, ...],
    notes: tuple[str, ...],
) -> Appended:
    """Append the ids of a close and a suffix to a prompt, which is not copied before it is read."""
    parts = Unjoined(prompt_ids, len(prompt_ids), close_ids + suffix_ids)
    return Appended(parts, list(close_ids), list(suffix_ids), notes)
