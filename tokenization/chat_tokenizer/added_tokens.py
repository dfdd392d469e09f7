"""The added tokens of a tokenizer, which it never merges with the text around them."""

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Token:
    """An added token found in a text. The tokenizer never merges text across its edges."""

    id: int
    start: int
    end: int


class AddedTokens:
    """Finds added tokens in texts."""

    def __init__(self, ids: Mapping[str, int], special_ids: Set[int], stop_ids: Set[int]) -> None:
        """Args:
        ids: the id of each added token, by its text.
        special_ids: ids of those that are special.
        stop_ids: ids that end a turn of the model; these count as special too.
        """
        self.stop_ids = frozenset(stop_ids)
        self.special_ids = frozenset(special_ids) | self.stop_ids
        self._ids = dict(ids)
        self._texts = {number: text for text, number in ids.items()}
        longest_first = sorted(ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def find(self, text: str, *, special: bool = False) -> tuple[Token, ...]:
        """The added tokens in a text, in order; or only the special ones."""
        found = (Token(self._ids[m.group()], m.start(), m.end()) for m in self._pattern.finditer(text))
        return tuple(token for token in found if not special or token.id in self.special_ids)

    def id_at(self, text: str, position: int) -> int | None:
        """The id of the added token that starts at a position, in characters; None if there is none."""
        match = self._pattern.match(text, position)
        return self._ids[match.group()] if match else None

    def id_at_end(self, text: str) -> int | None:
        """The id of the added token that ends a text; None if there is none."""
        ends = [token for token in self._ids if text.endswith(token)]
        return self._ids[max(ends, key=len)] if ends else None

    def text(self, number: int) -> str:
        """The text of an added token; empty for other ids."""
        return self._texts.get(number, "")

    def shared(self, first: str, second: str) -> int:
        """Length of the common prefix, in characters, ending where no added token is cut in two.

        Example: of `<|im_end|>` and `<|im_start|>` the texts share `<|im_`; the result is 0.
        """
        shared = common_prefix_length(first, second)
        for text in (first, second):
            for token in self.find(text):
                if token.start < shared < token.end:
                    shared = token.start
        return shared


def common_prefix_length(first: str, second: str) -> int:
    """The number of characters that two texts have in common at their start."""
    for index, (left, right) in enumerate(zip(first, second, strict=False)):
        if left != right:
            return index
    return min(len(first), len(second))
