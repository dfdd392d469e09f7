"""Writes the samples of rollouts to a file when they are finished, until it is stopped."""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import BinaryIO

import msgspec

from tokenproxy.record.store import LAST_POSITION, Store, StoreError, StoreUnusable
from tokenproxy.samples.export import JsonLines, Report
from tokenproxy.samples.feed import FeedFilter, read_step
from tokenproxy.samples.layouts import Layout

POLL_S = 0.5
"""Seconds between two reads of a feed that has not grown."""
_ROLLOUTS_AT_ONCE = 16
_TAIL_BYTES = 2**16


@dataclass
class Follower:
    """Reads the feed of a store and writes its samples, one JSON object a line."""

    store: Store
    layout: Layout
    selected: FeedFilter
    position: int
    """Everything up to here was written and flushed; the first step reads after it."""
    poll_s: float = POLL_S
    report: Report = field(default_factory=Report)
    _stopped: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self) -> None:
        """End `run` before the next rollout."""
        self._stopped.set()

    async def run(self, file: BinaryIO, on_error: Callable[[StoreError], object]) -> None:
        """Write what is finished until `stop`.

        Args:
            on_error: called once each time that the store stops responding.

        Raises:
            StoreUnusable: the store can never be read.
            OSError: the file cannot be written.
        """
        works = True
        while not self._stopped.is_set():
            try:
                grown = await self._step(file)
                works = True
            except StoreUnusable:
                raise
            except StoreError as error:
                if works:
                    on_error(error)
                grown = works = False
            if not grown:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.poll_s):
                        await self._stopped.wait()

    async def _step(self, file: BinaryIO) -> bool:
        """Write the next rollouts; False if there are no more for now."""
        # a position beyond the end, as after the loss of a store, counts as the end
        self.position = min(self.position, (await self.store.feed(LAST_POSITION, limit=0)).end)
        step = await read_step(self.store, self.position, _ROLLOUTS_AT_ONCE, self.selected)
        for rollout in step.rollouts:
            if self._stopped.is_set():
                return True
            rows = JsonLines(file)
            for sample in rollout.samples:
                rows.write(self.layout.row(sample))
            rows.finish()
            self.position = rollout.session.position
            self.report.add(rollout.samples, rollout.refused)
        self.position = step.position
        return step.more


def end_last_line(file: BinaryIO) -> None:
    """Remove a line that a killed process wrote only in part at the end of a file.

    Args:
        file: open for reading and writing; the position moves to its end.
    """
    start = size = file.seek(0, os.SEEK_END)
    blocks: list[bytes] = []
    while start > 0 and (not blocks or b"\n" not in blocks[-1]):
        length = min(_TAIL_BYTES, start)
        start = file.seek(start - length)
        blocks.append(file.read(length))
    line = b"".join(reversed(blocks)).rpartition(b"\n")[2]
    try:
        msgspec.json.decode(line or b"null")
    except msgspec.DecodeError:
        file.truncate(size - len(line))
    file.seek(0, os.SEEK_END)
    if line and file.tell() == size:
        file.write(b"\n")
