"""Sends one call to many replicas at the same moment, and makes one answer of theirs. Nothing is repeated.

Calls that meet in a rendezvous return only when every replica got its own: a loop that waits for one replica
before it sends to the next one would wait for ever.

Clients of a single engine must not notice: an answer that all replicas gave is passed on as it is. A call
that failed on some of them is an error that names each replica. Its status is 424, because clients repeat
calls after 500, 502 and 503 by themselves, and half an update must not be repeated unasked.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tokenproxy.base.errors import ApiError
from tokenproxy.base.http import JSON_HEADERS, BytesResponse, Request, Response
from tokenproxy.base.types import Headers
from tokenproxy.engine.protocol import fetch
from tokenproxy.fleet.admin_calls import AdminCall, Join
from tokenproxy.fleet.replica import Replica

FAILED = 424
_SHOWN_BYTES = 2000
"""Of an answer that is not JSON."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one replica answered."""

    replica: Replica
    status: int = 0
    """0 if there is no answer."""
    headers: Headers = field(default_factory=list)
    body: bytes = b""
    problem: str = ""
    """Why there is no answer, or why it counts as a failure."""

    @property
    def ok(self) -> bool:
        """Whether the call succeeded on this replica."""
        return 200 <= self.status < 300 and not self.problem

    @property
    def refused(self) -> bool:
        """Whether the replica refused the request before it did anything."""
        return 400 <= self.status < 500

    @property
    def answer(self) -> Any:
        """The answer: parsed if it is JSON, else its text; None if it is empty."""
        try:
            return msgspec.json.decode(self.body) if self.body else None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self.body.decode("utf-8", "replace")[:_SHOWN_BYTES]

    def value(self, name: str) -> Any:
        """A field of the answer; None if the answer is no JSON object, or has no such field."""
        answer = self.answer
        return answer.get(name) if isinstance(answer, dict) else None

    def why(self) -> str:
        """Why the call failed, in one sentence without its end."""
        text = self.body.decode("utf-8", "replace")[:_SHOWN_BYTES]
        return self.problem or f"it answered {self.status}: {text}".removesuffix(": ")


async def fan_out(requests: Mapping[Replica, Request], timeout_s: float) -> list[Outcome]:
    """Send each replica its request; returns one outcome for each, in the same order. Never raises an error.

    Args:
        timeout_s: for each replica, until the end of its answer.
    """

    async def send(replica: Replica, request: Request) -> Outcome:
        try:
            async with asyncio.timeout(timeout_s):
                response = await replica.engine.send(request)
                try:
                    body = await response.read()
                finally:
                    await response.aclose()
        except TimeoutError:
            return Outcome(replica, problem=f"no answer within {timeout_s:g} s (`weight_update_timeout_s`)")
        except ApiError as error:
            return Outcome(replica, problem=error.message)
        return Outcome(replica, response.status, response.headers, body)

    return list(await asyncio.gather(*(send(*pair) for pair in requests.items())))


async def ask(replica: Replica, path: str, timeout_s: float) -> Outcome:
    """Ask a replica for a page of its own; status 0 without an answer."""
    try:
        async with asyncio.timeout(timeout_s):
            status, body = await fetch(replica.questions, Request("GET", path))
    except (ApiError, TimeoutError):
        return Outcome(replica)
    return Outcome(replica, status, [], body)


def join_answers(call: AdminCall, outcomes: Sequence[Outcome], note: str = "") -> Response:
    """The answer to the client.

    Args:
        note: what the proxy did after a failure, for the message.
    """
    first, failed = outcomes[0], [outcome for outcome in outcomes if not outcome.ok]
    if not failed and (joined := _joined(call, outcomes)) is not None:
        return _json(200, {**first.answer, call.field: joined})
    equal = all((each.status, each.body) == (first.status, first.body) for each in outcomes)
    if equal and first.status and not note:
        return BytesResponse(first.status, first.headers, first.body)
    replicas = {
        each.replica.name: {
            "succeeded": each.ok,
            "status": each.status or None,
            "answer": each.answer,
            **({"problem": each.problem} if each.problem else {}),
        }
        for each in outcomes
    }
    if not failed:
        return _json(200, {"succeeded": "all", "replicas": replicas})
    problems = "; ".join(f"{each.replica.name}: {each.why()}" for each in failed)
    message = f"{call.path} failed on {len(failed)} of {len(outcomes)} replicas: {problems}"
    message = f"{message}. {note}" if note else message
    error = {"message": message, "type": "FailedDependencyError", "param": None, "code": "replicas_failed"}
    succeeded = "none" if len(failed) == len(outcomes) else "some"
    return _json(FAILED, {"error": error, "succeeded": succeeded, "replicas": replicas})


def _joined(call: AdminCall, outcomes: Sequence[Outcome]) -> Any:
    """The sum or the list of one field; None for other calls, or if an answer has no such field."""
    if call.join not in (Join.SUM, Join.CONCATENATE):
        return None
    kind = int if call.join is Join.SUM else list
    values: list[Any] = [outcome.value(call.field) for outcome in outcomes]
    if any(type(value) is not kind for value in values):
        return None
    return sum(values) if kind is int else [item for value in values for item in value]


def _json(status: int, body: object) -> Response:
    return BytesResponse(status, list(JSON_HEADERS), msgspec.json.encode(body))
