"""Conversations that were read last, ready to be gone on with. Nothing depends on it but speed."""

import threading
from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.history.conversation import Conversation

FROM_BYTES = 4096
"""Shorter conversations are sooner read than looked up."""
_HEAD = 1024
"""Bytes by which a conversation is found."""
_ALIKE = 64
"""How many of those that begin alike a request is compared with, the last used first."""

_Group = tuple[bytes, bytes]


class Warm:
    """At most `max_bytes` of conversations. Safe across threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._groups: dict[_Group, OrderedDict[bytes, Conversation]] = {}
        self._order: OrderedDict[bytes, _Group] = OrderedDict()
        self._lock = threading.Lock()

    def longest(self, begin: bytes, messages: bytes) -> "Conversation | None":
        """The longest conversation that an array of messages goes on with, byte for byte."""
        with self._lock:
            alike = self._groups.get((begin, messages[:_HEAD]))
            candidates = list(islice(reversed(alike.values()), _ALIKE)) if alike is not None else []
        return max(
            (known for known in candidates if known.begins(messages)),
            key=lambda known: len(known.stem),
            default=None,
        )

    def put(self, made: "Conversation", before: "Conversation | None") -> None:
        """Keep a conversation in place of the one it goes on with; those not used for longest leave."""
        if len(made.stem) < FROM_BYTES:
            return
        with self._lock:
            for old in (before, made):
                if old is not None:
                    self._drop(old.strict[-1])
            group, name = (made.begin.whole, made.stem[:_HEAD]), made.strict[-1]
            self._groups.setdefault(group, OrderedDict())[name] = made
            self._order[name] = group
            self._bytes += len(made.stem)
            while self._bytes > self._max_bytes and len(self._order) > 1:
                self._drop(next(iter(self._order)))

    def _drop(self, name: bytes) -> None:
        group = self._order.pop(name, None)
        if group is not None:
            self._bytes -= len(self._groups[group].pop(name).stem)
            if not self._groups[group]:
                del self._groups[group]
