"""What a client gets of a turn, written from what was read of the engine's response for the record."""

from abc import ABC, abstractmethod

from tokenproxy.base.errors import ApiError
from tokenproxy.record.completion import Completion
from tokenproxy.turn import wire
from tokenproxy.turn.usual_chunk import Piece, UsualChunk

DONE = b"[DONE]"
"""The data of the event that ends a stream; it is not a chunk."""


class Answer(ABC):
    """Writes one response. It reads either one completion, or chunks and then their end."""

    reads_tokens = False
    """Whether it needs the tokens of log-probabilities."""
    turn_id = ""
    """The id of the turn, set before anything is read; empty for a turn that is not recorded."""

    @abstractmethod
    def whole(self, parsed: wire.Parsed, body: bytes, read: Completion) -> bytes:
        """The body for a whole completion.

        Args:
            parsed: the completion, of which `body` is the JSON.
            read: what was read of it for the record.
        """

    @abstractmethod
    def event(self, event: bytes, usual: UsualChunk | None, read: Piece | wire.Parsed) -> bytes | None:
        """The events for the next event of the engine; None or empty if there are none.

        Args:
            event: one with data.
            usual: its chunk, if that has the usual shape.
            read: what was read of it.
        """

    @abstractmethod
    def end(self) -> bytes:
        """The events after the last chunk."""

    def broken(self, error: ApiError) -> bytes:
        """The events of a stream that cannot be completed, before the error event that every route has."""
        return b""

    async def settle(self) -> None:  # noqa: B027 - most formats have nothing to do
        """Do what must be done before the client gets the end of the response, such as to store it."""
