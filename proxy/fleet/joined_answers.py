"""Makes one answer of those of all replicas.

Clients of a single engine must not notice: an answer that all replicas gave is passed on as it is. A call
that failed on some of them is an error that names each replica. Its status is 424, because clients repeat
calls after 500, 502 and 503 by themselves, and half an update must not be repeated unasked.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from proxy.fleet.admin_calls import AdminCall, Join
from proxy.fleet.fan_out import Outcome
from proxy.http import JSON_HEADERS, BytesResponse, Response

FAILED = 424
_KIND = "FailedDependencyError"
_SHOWN_BYTES = 2000
"""Of an answer that is not JSON."""


def judged(call: AdminCall, outcome: Outcome) -> Outcome:
    """The outcome, as a failure where the answer reports one although its status is 200."""
    if call.join is Join.SUCCESS and outcome.ok and outcome.value("success") is False:
        problem = "it answered success: false"
        return Outcome(outcome.replica, outcome.status, outcome.headers, outcome.body, problem)
    return outcome


def join_answers(call: AdminCall, outcomes: Sequence[Outcome], note: str = "") -> Response:
    """The answer to the client.

    Args:
        note: what the proxy did after a failure, for the message.
    """
    first = outcomes[0]
    equal = all(
        (outcome.status, outcome.body) == (first.status, first.body) and outcome.status
        for outcome in outcomes
    )
    succeeded = sum(outcome.ok for outcome in outcomes)
    if succeeded == len(outcomes) and (combined := _combined(call, outcomes)) is not None:
        return combined
    if equal and not note:
        return BytesResponse(first.status, first.headers, first.body)
    if succeeded == len(outcomes):
        return _each(outcomes)
    return _error(call, outcomes, succeeded, note)


def _combined(call: AdminCall, outcomes: Sequence[Outcome]) -> Response | None:
    """The sum or the list of one field; None for other calls, or if an answer has no such field."""
    if call.join not in (Join.SUM, Join.CONCATENATE):
        return None
    kind = int if call.join is Join.SUM else list
    values: list[Any] = [outcome.value(call.field) for outcome in outcomes]
    if any(type(value) is not kind for value in values):
        return None
    total = sum(values) if call.join is Join.SUM else [item for value in values for item in value]
    body = {**_answer(outcomes[0]), call.field: total}
    return BytesResponse(200, list(JSON_HEADERS), msgspec.json.encode(body))


def _each(outcomes: Sequence[Outcome]) -> Response:
    """The answers of replicas that all succeeded, and differ."""
    body = {"succeeded": "all", "replicas": _by_name(outcomes)}
    return BytesResponse(200, list(JSON_HEADERS), msgspec.json.encode(body))


def _error(call: AdminCall, outcomes: Sequence[Outcome], succeeded: int, note: str) -> Response:
    failed = [outcome for outcome in outcomes if not outcome.ok]
    problems = "; ".join(f"{outcome.replica.name}: {problem_of(outcome)}" for outcome in failed)
    message = f"{call.path} failed on {len(failed)} of {len(outcomes)} replicas: {problems}"
    message = f"{message}. {note}" if note else message
    error = {"message": message, "type": _KIND, "param": None, "code": "replicas_failed"}
    body = {
        "error": error,
        "succeeded": "some" if succeeded else "none",
        "replicas": _by_name(outcomes),
    }
    return BytesResponse(FAILED, list(JSON_HEADERS), msgspec.json.encode(body))


def problem_of(outcome: Outcome) -> str:
    """Why a call failed on a replica, in one sentence without its end."""
    if outcome.problem:
        return outcome.problem
    text = outcome.body.decode("utf-8", "replace")[:_SHOWN_BYTES]
    return f"it answered {outcome.status}: {text}" if text else f"it answered {outcome.status}"


def _by_name(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    return {
        outcome.replica.name: {
            "succeeded": outcome.ok,
            "status": outcome.status or None,
            "answer": _answer(outcome),
            **({"problem": outcome.problem} if outcome.problem else {}),
        }
        for outcome in outcomes
    }


def _answer(outcome: Outcome) -> Any:
    """The answer of a replica: parsed if it is JSON, else its text; None if it is empty."""
    if not outcome.body:
        return None
    try:
        return msgspec.json.decode(outcome.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return outcome.body.decode("utf-8", "replace")[:_SHOWN_BYTES]
