"""Response headers that report where a prompt came from."""

from proxy.history.plan import Extended, Given, PromptPlan
from proxy.http import Response


def add_prompt_headers(response: Response, plan: PromptPlan) -> None:
    """Report on a successful response where its prompt came from and where its turn is recorded."""
    if response.status >= 400:
        return
    placement = plan.placement
    headers = {
        b"x-prompt-source": plan.source,
        b"x-prompt-reused": str(plan.reused) if isinstance(plan, Extended | Given) else "0",
        b"x-prompt-appended": _count(plan),
        b"x-prompt-reason": plan.reason,
        b"x-prompt-candidates": str(placement.candidates) if placement.candidates > 1 else None,
        b"x-session-id": placement.session.name if placement.conversation is not None else None,
        b"x-turn-id": placement.turn_id if placement.conversation is not None else None,
    }
    # an engine that is a tokenproxy itself has set these headers for its own prompt
    response.headers = [pair for pair in response.headers if pair[0] not in headers]
    response.headers += [(name, value.encode()) for name, value in headers.items() if value is not None]


def _count(plan: PromptPlan) -> str | None:
    if isinstance(plan, Extended):
        return str(len(plan.appended))
    return str(plan.appended) if isinstance(plan, Given) else None
