"""The blocks of a streamed message, written one after the other although their pieces may arrive mixed.

Law: the blocks of a stream hold the same reasoning, content and calls as the whole answer, however the engine
    splits and merges them into deltas.

A piece of the open block is sent at once, and text or reasoning ends a block of the other kind. A call ends
only when its arguments are a complete object: until then everything else waits, because an engine may return
to the call. What waited follows: first texts, then calls in their order.
"""

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import msgspec

from tokenproxy.base.errors import EngineBroken
from tokenproxy.turn import wire

_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
Sent = TypeVar("Sent")
"""How a format writes its events."""
Logprobs = list[dict[str, Any]]
_Late = list[tuple[str, Logprobs]]
"""Pieces of a text with their log-probabilities."""


def is_object(text: str) -> bool:
    """Whether a text is a complete JSON object."""
    try:
        _decode_object(text)
    except msgspec.DecodeError:
        return False
    return True


class Call:
    """A tool call, as far as its pieces arrived."""

    ended = False
    """Whether its block has ended."""

    def __init__(self, item: int) -> None:
        """`item`: its index among the calls of the message."""
        self.item = item
        self.id = ""
        self.name = ""
        self.pieces: list[str] = []
        """Of its arguments."""
        self._checked = 0
        self._complete = False

    @property
    def begins(self) -> bool:
        """Whether its block may begin: its name and its id are known, or arguments came before the id."""
        return bool(self.name and (self.id or self.pieces))

    @property
    def complete(self) -> bool:
        """Whether its arguments are a complete object."""
        if self._checked != len(self.pieces):  # else each text that waits would parse them again
            self._checked = len(self.pieces)
            last = self.pieces[-1].rstrip()
            self._complete = last[-1:] in ("", "}") and is_object("".join(self.pieces))
        return self._complete


class Blocks(ABC, Generic[Sent]):
    """The blocks of one message. A block is a `Call`, or the kind of its text."""

    empty: str
    """The kind of the text of a message without blocks."""
    keeps_blank = True
    """Whether white space after a call is written if no other text follows."""

    def __init__(self) -> None:
        self.calls: dict[int, Call] = {}
        """By position."""
        self.open: str | Call | None = None
        self._waiting: list[Call] = []
        """Calls whose blocks have not begun."""
        self._late: dict[str, _Late] = {}
        """By kind: what came while a call was open. White space may stay."""

    def add_text(self, kind: str, text: str, sent: list[Sent], logprobs: Logprobs | None = None) -> None:
        """Add a piece of a text. `sent` gets the events that can be sent now."""
        if self.open.__class__ is Call or kind in self._late:
            self._late.setdefault(kind, []).append((text, logprobs or []))
            self._go_on(sent)
            return
        if self.open != kind:
            self._end(sent, "completed")
            self._begin(kind, sent)
        self._text(kind, text, logprobs or [], sent)

    def add_call(self, piece: wire.CallPiece, sent: list[Sent]) -> None:
        """Add a piece of a call. The first id and the first name count: some engines repeat them.

        Raises:
            EngineBroken: the call has ended, because its arguments were complete.
        """
        call = self.calls.get(piece.position)
        if call is None:
            call = self.calls[piece.position] = Call(len(self.calls))
            self._waiting.append(call)
        call.id, call.name = call.id or piece.id, call.name or piece.name
        if piece.arguments:
            if call.ended and piece.arguments.strip():
                raise EngineBroken("the engine continued a tool call whose arguments were complete")
            call.pieces.append(piece.arguments)
            if call is self.open:
                self._arguments(call, piece.arguments, sent)
        if self._waiting or self._late:
            self._go_on(sent)

    def end(self, status: str, sent: list[Sent]) -> None:
        """End the message; a message without blocks gets an empty text.

        Args:
            status: of the blocks that have not ended.
        """
        self._go_on(sent, status)
        if self.open is None:
            self._begin(self.empty, sent)
        self._end(sent, status)

    def _go_on(self, sent: list[Sent], status: str = "") -> None:
        """Write what waits, as far as the open block can end; all of it with a final `status`."""
        while self._late or self._waiting:
            if isinstance(self.open, Call) and not (status or self.open.complete):
                return
            # white space between calls is no answer; it waits for more
            kinds = (
                kind for kind, late in self._late.items() if (status and self.keeps_blank) or _shows(late)
            )
            kind = next(kinds, None)
            if kind is not None:
                late = self._late.pop(kind)
                self._end(sent, status or "completed")
                self._begin(kind, sent)
                logprobs = [each for _, more in late for each in more]
                self._text(kind, "".join(text for text, _ in late), logprobs, sent)
            elif self._waiting and (status or self._waiting[0].begins):
                call = self._waiting.pop(0)
                self._end(sent, status or "completed")
                self._begin(call, sent)
                if call.pieces:
                    self._arguments(call, "".join(call.pieces), sent)
            else:
                return

    def _begin(self, block: str | Call, sent: list[Sent]) -> None:
        self.open = block
        self._start(block, sent)

    def _end(self, sent: list[Sent], status: str) -> None:
        block, self.open = self.open, None
        if block is None:
            return
        if isinstance(block, Call):
            block.ended = True
        self._stop(block, status, sent)

    @abstractmethod
    def _start(self, block: str | Call, sent: list[Sent]) -> None:
        """Write the events with which a block begins."""

    @abstractmethod
    def _text(self, kind: str, text: str, logprobs: Logprobs, sent: list[Sent]) -> None:
        """Write the next piece of the text of the open block."""

    @abstractmethod
    def _arguments(self, call: Call, arguments: str, sent: list[Sent]) -> None:
        """Write the next piece of the arguments of the open call."""

    @abstractmethod
    def _stop(self, block: str | Call, status: str, sent: list[Sent]) -> None:
        """Write the events with which a block ends. `status`: `completed` or `incomplete`."""


def _shows(late: _Late) -> bool:
    """Whether texts are more than white space."""
    return any(text.strip() for text, _ in late)
