"""The interface of spans for the traced code. `tracing.py` implements it with OpenTelemetry."""

from collections.abc import Mapping
from types import TracebackType
from typing import Protocol, Self

from proxy.types import Headers

Value = str | int | float | bool | list[str]
"""The value of an attribute. None is left out."""


class Span(Protocol):
    """One step of a request. Leaving its `with` block ends it; an exception marks it as failed."""

    recording: bool
    """Whether attributes are recorded; if not, skip computing them."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def set(self, attributes: Mapping[str, Value | None]) -> None:
        """Set attributes."""
        ...

    def rename(self, name: str) -> None:
        """Rename the span."""
        ...

    def child(self, name: str, attributes: Mapping[str, Value | None], *, client: bool = False) -> "Span":
        """Start a child span.

        Args:
            client: whether the step is a request to another service.
        """
        ...

    def inject(self, headers: Headers) -> Headers:
        """The headers with the trace context (`traceparent`) of this span."""
        ...

    def fail(self, problem: str) -> None:
        """Mark the step as failed."""
        ...

    def end(self, error: BaseException | None = None) -> None:
        """End the span; for spans without a `with` block."""
        ...

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits; empty if there is no trace."""
        ...


class NoSpan:
    """The span used where nothing is traced. It has no state, so one serves all requests."""

    __slots__ = ()
    recording = False
    trace_id = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def set(self, attributes: Mapping[str, Value | None]) -> None:
        """Does nothing."""

    def rename(self, name: str) -> None:
        """Does nothing."""

    def child(self, name: str, attributes: Mapping[str, Value | None], *, client: bool = False) -> Span:
        """Itself."""
        return self

    def inject(self, headers: Headers) -> Headers:
        """Return the headers unchanged: the engine gets a client's trace context."""
        return headers

    def fail(self, problem: str) -> None:
        """Does nothing."""

    def end(self, error: BaseException | None = None) -> None:
        """Does nothing."""


NO_SPAN: Span = NoSpan()


class Tracing(Protocol):
    """Creates the spans of one application."""

    def request_span(self, method: str, path: str, headers: Headers) -> Span:
        """The span of a request, which continues the trace context in its headers."""
        ...

    def close(self) -> None:
        """Send the remaining spans. It may block for seconds: call it on a thread."""
        ...
