"""Response headers that report where a prompt came from."""

from proxy.history.plan import Extended, Given, PromptPlan
from proxy.http import Response


def add_prompt_headers(response: Response, plan: PromptPlan) -> None:
    """Report on a successful response where its prompts came from and where their turns are recorded."""
    if response.status >= 400:
        return
    placement = plan.placement
    headers = {
        b"x-prompt-source": plan.source,
        b"x-prompt-reused": str(sum(map(_reused, plan.prompts))),
        b"x-prompt-appended": _count(plan),
        b"x-prompt-reason": plan.reason,
        b"x-prompt-candidates": str(placement.candidates) if placement.candidates > 1 else None,
        b"x-session-id": placement.session.name if plan.rollout is not None else None,
        b"x-turn-id": placement.turn_id if placement.conversation is not None else None,
    }
    # an engine that is a tokenproxy itself has set these headers for its own prompt
    response.headers = [pair for pair in response.headers if pair[0] not in headers]
    response.headers += [(name, value.encode()) for name, value in headers.items() if value is not None]


def _reused(plan: PromptPlan) -> int:
    return plan.reused if isinstance(plan, Extended | Given) else 0


def _count(plan: PromptPlan) -> str | None:
    if isinstance(plan, Extended):
        return str(len(plan.appended))
    return str(plan.appended) if isinstance(plan, Given) else None
