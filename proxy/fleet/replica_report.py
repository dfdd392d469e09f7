"""What the proxy reports of a replica."""

from typing import TYPE_CHECKING, Any

from proxy.engine.discovery import NO_TOKEN_IN

if TYPE_CHECKING:
    from proxy.fleet.replica import Replica


def report(replica: "Replica") -> dict[str, Any]:
    """A replica's part of `GET /ready`."""
    capabilities = replica.capabilities
    if capabilities is None:
        return {
            "engine": replica.engine.name,
            "ready": False,
            "problem": replica.problem,
            "draining": replica.draining,
            "requests": replica.load.requests,
        }
    problem = replica.difference or replica.weight_problem
    report: dict[str, Any] = {
        "engine": replica.engine.name,
        "ready": not problem,
        "version": capabilities.version,
        "model": capabilities.model.name if capabilities.model else None,
        "token_in": capabilities.token_in.name if capabilities.token_in else None,
        "breaker": replica.breaker.state,
        "draining": replica.draining,
        "requests": replica.load.requests,
    }
    if replica.weight_version is not None:
        report["weight_version"] = replica.weight_version
    if problem:
        report["problem"] = problem
    elif replica.breaker.ejected:
        report["problem"] = f"no requests for {replica.breaker.opens_for_s():.0f} s: {replica.breaker.reason}"
    elif capabilities.token_in is None:
        report["problem"] = NO_TOKEN_IN
    return report | _append_report(replica)


def _append_report(replica: "Replica") -> dict[str, Any]:
    """Whether messages can be appended, what the template's proof found, and the use of the cache."""
    tokenizer = replica.tokenizer
    if tokenizer is None:
        return {"append": str(replica.tokenizer_problem)}
    proof, cache = tokenizer.proof, tokenizer.cache_info()
    template = {}  # empty until the template was examined
    if proof is not None:
        template = {
            "after_messages": str(proof.after_messages),
            "after_results": str(proof.after_results),
            "reason": proof.reason,
        }
    return {
        "append": "ready",
        "template": template,
        "append_cache": {"hits": cache.hits, "misses": cache.misses},
    }
