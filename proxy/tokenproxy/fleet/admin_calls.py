"""The engine's routes that change or describe all replicas at once: one table, with a rule for each route.

A call is sent to all replicas at the same moment and never repeated. docs/weights.md has the same table.
Calls that meet in a rendezvous return only when every replica got its own: a loop that waits for one replica
before it sends to the next one would wait for ever.

Clients of a single engine must not notice: an answer that all replicas gave is passed on as it is. A call
that failed on some of them is an error that names each replica. Its status is 424, because clients repeat
calls after 500, 502 and 503 by themselves, and half an update must not be repeated unasked.

Most requests are passed on as they are. These differ:

    /pause?mode=keep               clear_cache=false is added: a cache that requests still use is not cleared
    /init_weight_transfer_engine   rank_offset of replica i = the given one + workers of the replicas before i
    /finish_weight_update          gets a version if the trainer named none
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import Any

import msgspec

from tokenproxy.base.errors import ApiError, BadRequest, EngineBroken
from tokenproxy.base.fields import join, parse, raw, read
from tokenproxy.base.http import (
    JSON_HEADERS,
    BytesResponse,
    Request,
    Response,
    json_response,
    query_value,
    read_and_close,
)
from tokenproxy.base.types import Fields, Headers
from tokenproxy.engine.protocol import Engine
from tokenproxy.fleet.replica import Replica


class Effect(StrEnum):
    """What a call changes, as far as the proxy has to know."""

    NONE = "none"
    PAUSE = "pause"
    """New requests wait from now on."""
    RESUME = "resume"
    """The waiting requests are sent."""
    SLEEP = "sleep"
    """As a pause; the caches are cleared."""
    WAKE = "wake"
    """Ends the sleep if all memory is back."""
    JOIN = "join"
    """The replicas join the trainer's group of processes, each with its own `rank_offset`."""
    LEAVE = "leave"
    """The replicas leave that group."""
    START = "start"
    """A weight update starts. New requests wait."""
    LOAD = "load"
    """Weights are loaded."""
    FINISH = "finish"
    """The update ends, and its version gets a name."""
    NAME = "name"
    """The version of the weights gets a name."""
    CALL = "call"
    """Anything: a method of the workers, which may load weights."""
    ADD_ADAPTER = "add_adapter"
    ABORT = "abort"
    """Requests end."""


@dataclass(frozen=True, slots=True)
class AdminCall:
    """The rule of one route."""

    method: str
    path: str
    summary: str
    effect: Effect = Effect.NONE
    field: str = ""
    """The field of the answers, a number or a list, that is added up. Without one, equal answers are one."""
    leaves: bool = False
    """Whether a replica on which it fails leaves service, because it differs from the others from now on."""


_GET, _POST = "GET", "POST"

ADMIN_CALLS = (
    AdminCall(_POST, "/pause", "Pause all replicas", Effect.PAUSE),
    AdminCall(_POST, "/resume", "Resume all replicas", Effect.RESUME, leaves=True),
    AdminCall(_GET, "/is_paused", "Whether the replicas are paused"),
    AdminCall(_POST, "/abort_requests", "Abort running requests", Effect.ABORT, field="aborted"),
    AdminCall(_POST, "/init_weight_transfer_engine", "Join the trainer's process group", Effect.JOIN),
    AdminCall(_POST, "/shutdown_weight_transfer_engine", "Leave the trainer's process group", Effect.LEAVE),
    AdminCall(_POST, "/start_weight_update", "Begin a weight update", Effect.START, leaves=True),
    AdminCall(_POST, "/start_draft_weight_update", "Begin one of the draft model", Effect.START, leaves=True),
    AdminCall(_POST, "/update_weights", "Load weights", Effect.LOAD, leaves=True),
    AdminCall(_POST, "/finish_weight_update", "End a weight update", Effect.FINISH, leaves=True),
    AdminCall(_POST, "/update_weight_version", "Name the version", Effect.NAME, leaves=True),
    AdminCall(_GET, "/weight_info", "The version of the weights"),
    AdminCall(_POST, "/weight_checker", "Checksums of the weights"),
    AdminCall(_GET, "/get_world_size", "Workers of all replicas", field="world_size"),
    AdminCall(_POST, "/reset_prefix_cache", "Clear the prefix caches"),
    AdminCall(_POST, "/reset_mm_cache", "Clear the caches of media"),
    AdminCall(_POST, "/reset_encoder_cache", "Clear the caches of encoders"),
    AdminCall(_POST, "/sleep", "Put all replicas to sleep", Effect.SLEEP),
    AdminCall(_POST, "/wake_up", "Wake all replicas up", Effect.WAKE, leaves=True),
    AdminCall(_GET, "/is_sleeping", "Whether the replicas sleep"),
    AdminCall(_POST, "/release_kv_cache_memory", "Free the memory of the KV caches"),
    AdminCall(_POST, "/collective_rpc", "Call all workers", Effect.CALL, field="results", leaves=True),
    AdminCall(_POST, "/v1/load_lora_adapter", "Load an adapter on all replicas", Effect.ADD_ADAPTER),
    AdminCall(_POST, "/v1/unload_lora_adapter", "Unload an adapter from all replicas"),
)

WORLD_SIZE = "/get_world_size"
_WORLD_SIZE_S = 30.0
_NOT_PASSED_ON = frozenset({b"x-replica", b"accept-encoding", b"idempotency-key"})
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
    """Why there is no answer."""

    @property
    def ok(self) -> bool:
        """Whether the call succeeded on this replica."""
        return 200 <= self.status < 300 and self.value("success") is not False

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
    calls = [ask(replica.engine, replica, request, timeout_s) for replica, request in requests.items()]
    return list(await asyncio.gather(*calls))


async def ask(engine: Engine, replica: Replica, request: Request, timeout_s: float) -> Outcome:
    """What a replica answers; status 0 without an answer.

    Args:
        engine: the replica's, with the credential to use.
    """
    try:
        async with asyncio.timeout(timeout_s):
            response = await engine.send(request)
            body = await read_and_close(response)
    except TimeoutError:
        return Outcome(replica, problem=f"no answer within {timeout_s:g} s (`weight_update_timeout_s`)")
    except ApiError as error:
        return Outcome(replica, problem=error.message)
    return Outcome(replica, response.status, response.headers, body)


def join_answers(call: AdminCall, outcomes: Sequence[Outcome], note: str = "") -> Response:
    """The answer to the client.

    Args:
        note: what the proxy did after a failure, for the message.
    """
    first, failed = outcomes[0], [outcome for outcome in outcomes if not outcome.ok]
    if not failed and (joined := _joined(call, outcomes)) is not None:
        return json_response({**first.answer, call.field: joined})
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
        return json_response({"succeeded": "all", "replicas": replicas})
    problems = "; ".join(f"{each.replica.name}: {each.why()}" for each in failed)
    message = f"{call.path} failed on {len(failed)} of {len(outcomes)} replicas: {problems}"
    message = f"{message}. {note}" if note else message
    error = {"message": message, "type": "FailedDependencyError", "param": None, "code": "replicas_failed"}
    succeeded = "none" if len(failed) == len(outcomes) else "some"
    return json_response({"error": error, "succeeded": succeeded, "replicas": replicas}, FAILED)


def _joined(call: AdminCall, outcomes: Sequence[Outcome]) -> Any:
    """The sum or the joined list of one field; None for other calls, or if an answer has no such field."""
    values: list[Any] = [outcome.value(call.field) for outcome in outcomes]
    if all(type(value) is list for value in values):
        return [item for value in values for item in value]
    return sum(values) if all(type(value) is int for value in values) else None


async def make_requests(
    call: AdminCall,
    request: Request,
    replicas: Sequence[Replica],
    version: str | None,
    unnamed: Collection[Replica],
) -> dict[Replica, Request]:
    """One request for each replica, in the same order.

    Args:
        version: the version that the call sets; None if it sets none.
        unnamed: replicas that must not get the version.

    Raises:
        BadRequest: the body is not what the call needs.
        EngineBroken: a replica does not report its world size.
    """
    effect, path, body = call.effect, request.path, request.body
    headers = [pair for pair in request.headers if pair[0] not in _NOT_PASSED_ON]
    bodies = [body] * len(replicas)
    if effect is Effect.JOIN:
        bodies = await _with_rank_offsets(body, headers, replicas)
    elif effect is Effect.FINISH:
        fields = {name: value for name, value in _fields(body).items() if name != "weight_version"}
        named = fields | ({"weight_version": raw(version)} if version is not None else {})
        bodies = [join(fields if replica in unnamed else named) for replica in replicas]
        if all(name != b"content-type" for name, _ in headers):
            headers.extend(JSON_HEADERS)
    elif effect is Effect.PAUSE and query_value(request, "mode", "") == "keep":
        path += "" if query_value(request, "clear_cache", "") else "&clear_cache=false"
    return {
        replica: Request(request.method, path, headers, each, fresh=True)
        for replica, each in zip(replicas, bodies, strict=True)
    }


async def _with_rank_offsets(body: bytes, headers: Headers, replicas: Sequence[Replica]) -> list[bytes]:
    fields = parse(body)
    info = read(fields, "init_info", Fields)
    if info is None:
        raise BadRequest.of("init_info", "is required: an object")
    offset, total = _integer(info, "rank_offset"), _integer(info, "world_size")
    if offset is None or len(replicas) == 1:
        return [body] * len(replicas)
    sizes = await _world_sizes(headers, replicas)
    if total is not None and total < offset + sum(sizes):
        raise BadRequest.of(
            "init_info.world_size",
            f"is {total}, but the fleet has {sum(sizes)} workers from rank "
            f"{offset} on: use the sum that GET {WORLD_SIZE} returns",
        )
    infos = [{**info, "rank_offset": raw(start)} for start in accumulate(sizes[:-1], initial=offset)]
    return [join({**fields, "init_info": msgspec.Raw(join(each))}) for each in infos]


async def _world_sizes(headers: Headers, replicas: Sequence[Replica]) -> list[int]:
    """The number of workers of each replica. Raises EngineBroken."""
    request = Request("GET", WORLD_SIZE, headers, fresh=True)
    outcomes = await fan_out(dict.fromkeys(replicas, request), _WORLD_SIZE_S)
    for outcome in outcomes:
        if not outcome.ok or type(outcome.value("world_size")) is not int:
            raise EngineBroken(f"{outcome.replica.name} does not report its world size: {outcome.why()}")
    return [outcome.value("world_size") for outcome in outcomes]


def named_version(call: AdminCall, request: Request) -> str | None:
    """The version that a call sets; None if it sets none.

    Raises:
        BadRequest: it is not a text.
    """
    if call.effect is Effect.FINISH:
        return read(_fields(request.body), "weight_version", str) or None
    if call.effect is not Effect.NAME:
        return None
    version = read(parse(request.body), "new_version", str)
    if not version:
        raise BadRequest.of("new_version", "is required: a text")
    return version


def adapter_to_unload(request: Request) -> bytes | None:
    """The body that unloads the adapter which a request loads; None if it replaces one of that name."""
    fields = parse(request.body)
    name = fields.get("lora_name")
    if name is None or bytes(fields.get("load_inplace") or b"false") != b"false":
        return None
    return join({"lora_name": name})


def _fields(body: bytes) -> Fields:
    """The fields of a body that may be empty or null."""
    return parse(body) if body.strip() not in (b"", b"null") else {}


def _integer(fields: Fields, name: str) -> int | None:
    """An integer of `init_info`; None if it has none."""
    try:
        return msgspec.json.decode(fields.get(name) or b"null", type=int | None)
    except msgspec.DecodeError as error:
        raise BadRequest.of(f"init_info.{name}", "must be an integer") from error
