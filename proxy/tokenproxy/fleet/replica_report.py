"""What the proxy reports of a replica."""

from typing import TYPE_CHECKING, Any

from tokenproxy.engine.discovery import NO_TOKEN_IN

if TYPE_CHECKING:
    from tokenproxy.fleet.replica import Replica


def report(replica: "Replica") -> dict[str, Any]:
    """A replica's part of `GET /ready`."""
    capabilities = replica.capabilities
    facts: dict[str, Any] = {
        "engine": replica.name,
        "draining": replica.draining,
        "requests": replica.load.requests,
    }
    if capabilities is None:
        return facts | {"ready": False, "problem": replica.problem}
    differs = replica.difference or replica.fleet.weights.problem(replica)
    problem = differs
    if not problem and replica.breaker.opens_for_s():
        problem = f"no requests for {replica.breaker.opens_for_s():.0f} s: {replica.breaker.reason}"
    elif not problem and capabilities.token_in is None:
        problem = NO_TOKEN_IN
    facts |= {
        "ready": not differs,
        "version": capabilities.version,
        "model": capabilities.model.name if capabilities.model else None,
        "token_in": capabilities.token_in.name if capabilities.token_in else None,
        "breaker": replica.breaker.state,
    }
    optional = {"weight_version": replica.weight_version, "problem": problem or None}
    facts |= {name: value for name, value in optional.items() if value is not None}
    return facts | _append_report(replica)


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
