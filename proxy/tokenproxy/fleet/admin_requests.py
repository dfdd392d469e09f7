"""The request that each replica gets for one admin call.

Most calls are passed on as they are. These differ:

    /pause?mode=keep               clear_cache=false is added: a cache that requests still use is not cleared
    /init_weight_transfer_engine   rank_offset of replica i = the given one + workers of the replicas before i
    /finish_weight_update          gets a version if the trainer named none
"""

from collections.abc import Collection, Sequence
from itertools import accumulate

import msgspec

from tokenproxy.base.errors import BadRequest, EngineBroken
from tokenproxy.base.fields import join, parse, raw, read
from tokenproxy.base.http import Request, query_value
from tokenproxy.base.types import Fields, Headers
from tokenproxy.fleet.admin_calls import AdminCall, Effect, fan_out
from tokenproxy.fleet.replica import Replica

WORLD_SIZE = "/get_world_size"
_WORLD_SIZE_S = 30.0
_NOT_PASSED_ON = frozenset({b"x-replica", b"accept-encoding", b"idempotency-key"})


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
            headers.append((b"content-type", b"application/json"))
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
