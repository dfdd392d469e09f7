"""The request that each replica gets for one admin call.

Most calls are passed on as they are. These differ:

    /pause?mode=keep               clear_cache=false is added: a cache that requests still use is not cleared
    /init_weight_transfer_engine   rank_offset of replica i = the given one + workers of the replicas before i
    /update_weights                a list with one entry for each worker is cut into the parts of the replicas
    /finish_weight_update          gets a version if the trainer named none
"""

from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from proxy.errors import BadRequest, EngineBroken
from proxy.fields import join, parse, raw, read
from proxy.fleet.admin_calls import AdminCall, Effect
from proxy.fleet.fan_out import fan_out
from proxy.fleet.joined_answers import problem_of
from proxy.fleet.replica import Replica
from proxy.fleet.weights import Weights
from proxy.http import Request, query_value
from proxy.types import Fields, Headers

WORLD_SIZE = "/get_world_size"
_NOT_PASSED_ON = frozenset({b"x-replica", b"accept-encoding", b"idempotency-key"})
_TRUE = ("true", "1", "yes", "on", "y", "t")
_UNLOADED_BY_NAME = "lora_name"


class AdminRequests:
    """Makes the requests of one call."""

    def __init__(self, call: AdminCall, request: Request, weights: Weights) -> None:
        self._call = call
        self._request = request
        self._weights = weights

    async def make(
        self, replicas: Sequence[Replica], version: str | None, unnamed: Collection[Replica]
    ) -> dict[Replica, Request]:
        """One request for each replica, in the same order.

        Args:
            version: the version that the call sets; None if it sets none.
            unnamed: replicas that must not get the version.

        Raises:
            BadRequest: the body is not what the call needs.
            EngineBroken: a replica does not report its world size.
        """
        effect, body = self._call.effect, self._request.body
        if effect is Effect.JOIN:
            bodies = await self._with_rank_offsets(replicas)
        elif effect is Effect.LOAD:
            bodies = await self._with_own_updates(replicas)
        elif effect is Effect.FINISH:
            fields = _fields(body)
            bodies = [_with_version(fields, None if replica in unnamed else version) for replica in replicas]
        else:
            bodies = [body] * len(replicas)
        path, headers = self._path(), self._headers()
        return {
            replica: Request(self._request.method, path, headers, each, fresh=True)
            for replica, each in zip(replicas, bodies, strict=True)
        }

    def _path(self) -> str:
        keeps = self._call.effect is Effect.PAUSE and query_value(self._request, "mode", "") == "keep"
        if keeps and not query_value(self._request, "clear_cache", ""):
            return f"{self._request.path}&clear_cache=false"
        return self._request.path

    def _headers(self) -> Headers:
        headers = [pair for pair in self._request.headers if pair[0] not in _NOT_PASSED_ON]
        if self._call.effect is Effect.FINISH and all(name != b"content-type" for name, _ in headers):
            headers.append((b"content-type", b"application/json"))
        return headers

    async def _with_rank_offsets(self, replicas: Sequence[Replica]) -> list[bytes]:
        fields = parse(self._request.body)
        info = read(fields, "init_info", Fields)
        if info is None:
            raise BadRequest("`init_info` is required: an object", param="init_info")
        offset = _integer(info, "rank_offset")
        if offset is None or len(replicas) == 1:
            return [self._request.body] * len(replicas)
        sizes = await self._world_sizes(replicas)
        total = _integer(info, "world_size")
        if total is not None and total < offset + sum(sizes):
            raise BadRequest(
                f"`init_info.world_size` is {total}, but the fleet has {sum(sizes)} workers from rank "
                f"{offset} on: use the sum that GET {WORLD_SIZE} returns",
                param="init_info.world_size",
            )
        starts = accumulate(sizes[:-1], initial=offset)
        return [_replaced(fields, "init_info", {**info, "rank_offset": raw(start)}) for start in starts]

    async def _with_own_updates(self, replicas: Sequence[Replica]) -> list[bytes]:
        """An update may be a list with one entry for each worker, in the order of their ranks."""
        body = self._request.body
        fields = parse(body)
        info = fields.get("update_info")
        if info is None:
            raise BadRequest("`update_info` is required", param="update_info")
        if len(replicas) == 1 or bytes(memoryview(info)[:1]) != b"[":
            return [body] * len(replicas)
        entries = msgspec.json.decode(info, type=list[msgspec.Raw])
        sizes = await self._world_sizes(replicas)
        if len(entries) != sum(sizes):
            raise BadRequest(
                f"`update_info` has {len(entries)} entries, but the fleet has {sum(sizes)} workers",
                param="update_info",
            )
        ends = list(accumulate(sizes))
        parts = [entries[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        return [join({**fields, "update_info": raw(part)}) for part in parts]

    async def _world_sizes(self, replicas: Sequence[Replica]) -> list[int]:
        """The number of workers of each replica."""
        request = Request("GET", WORLD_SIZE, self._headers(), fresh=True)
        timeout_s = min(30.0, self._weights.timeout_s)
        sizes = []
        for outcome in await fan_out(dict.fromkeys(replicas, request), timeout_s):
            size = outcome.value("world_size")
            if not outcome.ok or type(size) is not int:
                raise EngineBroken(
                    f"{outcome.replica.name} does not report its world size: {problem_of(outcome)}"
                )
            sizes.append(size)
        return sizes


def named_version(call: AdminCall, request: Request) -> str | None:
    """The version that a call sets; None if it sets none.

    Raises:
        BadRequest: it is not a text.
    """
    if call.effect is Effect.NAME:
        version = read(parse(request.body), "new_version", str)
        if not version:
            raise BadRequest("`new_version` is required: a text", param="new_version")
        return version
    if call.effect is Effect.FINISH:
        return read(_fields(request.body), "weight_version", str) or None
    return None


def cleared_by(call: AdminCall, request: Request) -> bool:
    """Whether a call that succeeded cleared the prefix caches."""
    if call.effect is Effect.PAUSE:
        keeps = query_value(request, "mode", "abort") == "keep"
        return query_value(request, "clear_cache", "false" if keeps else "true").lower() in _TRUE
    if call.effect is Effect.SLEEP:
        return query_value(request, "level", "1") != "0"
    return call.effect is Effect.CLEAR


def adapter_to_unload(request: Request) -> bytes | None:
    """The body that unloads the adapter which a request loads; None if it replaces one of that name."""
    fields = parse(request.body)
    name = fields.get(_UNLOADED_BY_NAME)
    if name is None or bytes(fields.get("load_inplace") or b"false") != b"false":
        return None
    return join({_UNLOADED_BY_NAME: name})


def _fields(body: bytes) -> Fields:
    """The fields of a body that may be empty or null."""
    return parse(body) if body.strip() not in (b"", b"null") else {}


def _with_version(fields: Fields, version: str | None) -> bytes:
    rest = {name: value for name, value in fields.items() if name != "weight_version"}
    return join({**rest, "weight_version": raw(version)} if version is not None else rest)


def _integer(fields: Fields, name: str) -> int | None:
    """An integer of `init_info`; None if it has none."""
    value: Any = fields.get(name)
    if value is None:
        return None
    try:
        return msgspec.json.decode(value, type=int)
    except msgspec.DecodeError as error:
        raise BadRequest(f"`init_info.{name}` must be an integer", param=f"init_info.{name}") from error


def _replaced(fields: Fields, name: str, value: Fields) -> bytes:
    return join({**fields, name: msgspec.Raw(join(value))})
