"""Response headers that say how a prompt came about."""

from proxy.history.plan import Plan
from proxy.http import Response


def said(
    answer: Response, *, source: str, reused: int, appended: int | None = None, reason: str | None = None
) -> Response:
    """The answer with the headers that say how its prompt came about."""
    if answer.status < 400:
        _say(answer, b"x-prompt-source", source)
        _say(answer, b"x-prompt-reused", str(reused))
        _say(answer, b"x-prompt-appended", None if appended is None else str(appended))
        _say(answer, b"x-prompt-reason", reason)
    return answer


def placed(answer: Response, plan: Plan) -> Response:
    """The answer with the headers that say where its turn is recorded."""
    if answer.status < 400:
        _say(answer, b"x-session-id", plan.rollout)
        _say(answer, b"x-turn-id", plan.request)
        _say(answer, b"x-prompt-candidates", str(plan.candidates) if plan.candidates > 1 else None)
    return answer


def _say(answer: Response, name: bytes, value: str | None) -> None:
    """Set a header or take it off: an engine that is such a proxy itself has said it of its own prompt."""
    answer.headers = [pair for pair in answer.headers if pair[0] != name]
    if value is not None:
        answer.headers.append((name, value.encode()))
