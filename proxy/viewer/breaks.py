"""placeholder"""

from collections.abc import Sequence

import msgspec

from proxy.history.turn import Turn


class Break(msgspec.Struct, frozen=True):
    turn: str
    equal: int
    total: int


def breaks_of(turns: Sequence[Turn]) -> dict[str, Break]:
    return {}
