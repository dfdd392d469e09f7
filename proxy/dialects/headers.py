"""Response headers that say how a prompt came about."""

from proxy.engine.protocol import Answer
from proxy.rollout.plan import Plan


def said(
    answer: Answer, *, source: str, reused: int, appended: int | None = None, reason: str | None = None
) -> Answer:
    """The answer with the headers that say how its prompt came about."""
    if answer.status < 400:
        answer.headers.append((b"x-prompt-source", source.encode()))
        answer.headers.append((b"x-prompt-reused", str(reused).encode()))
        if appended is not None:
            answer.headers.append((b"x-prompt-appended", str(appended).encode()))
        if reason is not None:
            answer.headers.append((b"x-prompt-reason", reason.encode()))
    return answer


def placed(answer: Answer, plan: Plan) -> Answer:
    """The answer with the headers that say where its turn is recorded."""
    if answer.status < 400:
        answer.headers.append((b"x-session-id", plan.rollout.encode()))
        answer.headers.append((b"x-turn-id", plan.request.encode()))
        if plan.candidates > 1:
            answer.headers.append((b"x-prompt-candidates", str(plan.candidates).encode()))
    return answer
