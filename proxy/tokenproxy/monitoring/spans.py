"""The spans of a request as the traced code sees them. `tracing.py` implements them with OpenTelemetry."""

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from tokenproxy.base.types import Headers

Value = str | int | float | bool | list[str]
"""The value of an attribute. None is left out."""


class Span:
    """One step of a request. Leaving its `with` block ends it; an exception marks it as failed.

    This one is used where nothing is traced, and does nothing. It has no state, so one serves all requests.
    """

    __slots__ = ()

    @property
    def recording(self) -> bool:
        """Whether attributes are recorded; if not, skip computing them."""
        return False

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits; empty if there is no trace."""
        return ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(error)

    def set(self, attributes: Mapping[str, Value | None]) -> None:
        """Set attributes."""

    def rename(self, name: str) -> None:
        """Rename the span."""

    def child(self, name: str, attributes: Mapping[str, Value | None], *, client: bool = False) -> "Span":
        """Start a child span.

        Args:
            client: whether the step is a request to another service.
        """
        return self

    def inject(self, headers: Headers) -> Headers:
        """The headers with the trace context (`traceparent`) of this span; here that of the client."""
        return headers

    def fail(self, problem: str) -> None:
        """Mark the step as failed."""

    def end(self, error: BaseException | None = None) -> None:
        """End the span; for spans without a `with` block."""


NO_SPAN = Span()
