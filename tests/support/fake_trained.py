"""A fake vLLM whose weights can be updated: the development routes of vLLM, with its contracts.

While it is paused it samples nothing. It remembers under which version it sampled each id, so that a test can
compare what the proxy recorded.
"""

import asyncio
import json
import threading
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from aiohttp import web

from tests.support.fake_vllm import FakeVllm, Seen
from tests.support.fake_wire import Reply, event_of
from tests.support.tiny_model import TinyModel

_STEP_S = 0.002


class Rendezvous:
    """Where the engines of a fleet and the trainer meet: nobody continues before all have come."""

    def __init__(self, engines: int) -> None:
        self.engines = engines
        self.arrived = 0
        self.ranks: list[int] = []
        """Those that came, in order."""
        self._lock = threading.Lock()

    def come(self, ranks: list[int]) -> int:
        """Arrive with the workers of an engine; returns which meeting it is."""
        with self._lock:
            self.arrived += 1
            self.ranks += ranks
            return (self.arrived - 1) // self.engines

    def is_complete(self, meeting: int) -> bool:
        """Whether all have come to a meeting."""
        return self.arrived >= (meeting + 1) * self.engines


class FakeTrained(FakeVllm):
    """An engine with VLLM_SERVER_DEV_MODE=1."""

    def __init__(self, model: TinyModel, rendezvous: Rendezvous, workers: int = 1, **kwargs: Any) -> None:
        super().__init__(model, **kwargs)
        self.rendezvous = rendezvous
        self.workers = workers
        self.version = "default"
        self.weights = "default"
        """What it samples with; its version follows when the update ends."""
        self.paused = ""
        self.updating = False
        self.cached = True
        """Whether the prefix cache holds anything."""
        self.init_info: dict[str, Any] = {}
        self.update_info: Any = None
        self.adapters: set[str] = set()
        self.refuses: dict[str, int] = {}
        """Status that is answered to calls of a path, without doing anything."""
        self.waits_at: int | None = None
        """Number of ids after which each turn waits for other weights."""
        self.dies_at = ""
        """Path of the call at which it ends at once."""
        self.sampled: defaultdict[str, list[str]] = defaultdict(list)
        """By session: the weights that sampled each id."""

    async def _answer(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        call = _CALLS.get((seen.method, seen.path))
        if call is None:
            return await super()._answer(request, seen)
        if seen.path == self.dies_at:
            threading.Thread(target=self.kill).start()
            await asyncio.Event().wait()
        if seen.path in self.refuses:
            return web.json_response({"error": "refused"}, status=self.refuses[seen.path])
        handler: Callable[[web.Request, Seen], Awaitable[web.Response]] = getattr(self, call)
        return await handler(request, seen)

    async def _pause(self, request: web.Request, seen: Seen) -> web.Response:
        self.paused = request.query.get("mode", "abort")
        clears = "false" if self.paused == "keep" else "true"
        if request.query.get("clear_cache", clears) == "true":
            self.cached = False
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request, seen: Seen) -> web.Response:
        self.paused = ""
        return web.json_response({"status": "resumed"})

    async def _is_paused(self, request: web.Request, seen: Seen) -> web.Response:
        return web.json_response({"is_paused": bool(self.paused)})

    async def _abort(self, request: web.Request, seen: Seen) -> web.Response:
        return web.json_response({"status": "aborted", "aborted": self.running})

    async def _init(self, request: web.Request, seen: Seen) -> web.Response:
        self.init_info = seen.json["init_info"]
        first = self.init_info["rank_offset"]
        await self._meet(list(range(first, first + self.workers)))
        return web.json_response({"message": "Weight transfer initialized"})

    async def _shutdown(self, request: web.Request, seen: Seen) -> web.Response:
        self.init_info = {}
        return web.json_response({"message": "Weight transfer shut down"})

    async def _start_update(self, request: web.Request, seen: Seen) -> web.Response:
        self.updating = True
        return web.json_response({"message": "Weight update started"})

    async def _update(self, request: web.Request, seen: Seen) -> web.Response:
        if not self.updating:
            raise web.HTTPInternalServerError(
                text="start_weight_update must be called before update_weights."
            )
        self.update_info = seen.json["update_info"]
        await self._meet([])
        info = self.update_info
        # TRL names tensors and no version
        self.weights = str(info.get("weights", "tensors")) if isinstance(info, dict) else "list"
        return web.json_response({"message": "Weights updated"})

    async def _finish_update(self, request: web.Request, seen: Seen) -> web.Response:
        if not self.updating:
            raise web.HTTPInternalServerError(text="no update")
        self.updating = False
        body = seen.json if seen.body else {}
        if (version := (body or {}).get("weight_version")) is not None:
            self.version = version
        return web.json_response({"message": "Weight update finished"})

    async def _name(self, request: web.Request, seen: Seen) -> web.Response:
        self.version = seen.json["new_version"]
        return web.json_response({"success": True, "new_version": self.version})

    async def _weight_info(self, request: web.Request, seen: Seen) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _world_size(self, request: web.Request, seen: Seen) -> web.Response:
        return web.json_response({"world_size": self.workers})

    async def _reset(self, request: web.Request, seen: Seen) -> web.Response:
        self.cached = self.cached and self.running > 0
        return web.json_response({"success": not self.running})

    async def _sleep(self, request: web.Request, seen: Seen) -> web.Response:
        self.paused, self.cached = "sleep", False
        return web.json_response({"status": "sleeping", "level": int(request.query.get("level", "1"))})

    async def _wake_up(self, request: web.Request, seen: Seen) -> web.Response:
        awake = "tags" not in request.query
        self.paused = "" if awake else self.paused
        return web.json_response({"status": "awake" if awake else "sleeping", "tags": None})

    async def _is_sleeping(self, request: web.Request, seen: Seen) -> web.Response:
        return web.json_response({"is_sleeping": bool(self.paused)})

    async def _rpc(self, request: web.Request, seen: Seen) -> web.Response:
        return web.json_response({"results": [f"{self.port}/{worker}" for worker in range(self.workers)]})

    async def _load(self, request: web.Request, seen: Seen) -> web.Response:
        name = seen.json["lora_name"]
        if name in self.adapters:
            return web.json_response({"error": {"message": "already loaded"}}, status=400)
        self.adapters.add(name)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, request: web.Request, seen: Seen) -> web.Response:
        self.adapters.discard(seen.json["lora_name"])
        return web.Response(text="Success")

    async def _meet(self, ranks: list[int]) -> None:
        meeting = self.rendezvous.come(ranks)
        while not self.rendezvous.is_complete(meeting):  # noqa: ASYNC110 - they have several event loops
            await asyncio.sleep(_STEP_S)

    async def _finish(
        self, request: web.Request, reply: Reply, events: list[bytes], kind: str = "text/event-stream"
    ) -> web.StreamResponse:
        """An answer that is sampled id by id, as long as the engine is not paused."""
        session = request.headers.get("x-session-id", "")
        if (await request.json()).get("max_tokens") == 1:  # a probe, which waits as all others do
            await self._sample("", 0.0)
            return await super()._finish(request, reply, events, kind)
        response = web.StreamResponse(headers={"content-type": kind})
        stream = kind == "text/event-stream"
        async with self._counted() as settle:
            if stream:
                await response.prepare(request)
            for event in events if stream else [event_of({"token_ids": list(reply.ids)})]:
                ids = _ids_of(event)
                for _ in ids:
                    await self._sample(session, reply.pause_s)
                if stream:
                    await response.write(event)
            if not stream:
                response.content_length = len(events[0])
                await response.prepare(request)
                await response.write(events[0])
            await response.write_eof()
            settle()
        return response

    async def _sample(self, session: str, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        waits = session and len(self.sampled[session]) == self.waits_at
        while self.paused or (waits and self.weights == "default"):  # noqa: ASYNC110 - set from other threads
            await asyncio.sleep(_STEP_S)
        if session:
            self.sampled[session].append(self.weights)


def _ids_of(event: bytes) -> list[int]:
    data = event.removeprefix(b"data: ").strip()
    if data == b"[DONE]":
        return []
    chunk = json.loads(data)
    choices = chunk.get("choices") or [chunk]
    return [token for choice in choices for token in choice.get("token_ids") or []]


def update(client: httpx.Client, version: str | None, weights: str = "new") -> list[int]:
    """Update the weights behind a proxy as trainers do; returns the statuses of the steps."""
    last = {} if version is None else {"weight_version": version}
    steps = [
        ("/pause?mode=keep", None),
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": {"weights": weights}}),
        ("/finish_weight_update", last),
        ("/resume", None),
    ]
    return [client.post(path, json=body).status_code for path, body in steps]


def compare_turns(client: httpx.Client, sessions: list[str], engines: list[FakeTrained]) -> Counter[str]:
    """Compare the versions that were recorded with what sampled; counts the kinds of turns."""
    sampled: dict[str, list[str]] = {}
    for engine in engines:
        sampled |= engine.sampled
    kinds: Counter[str] = Counter()
    for name in sessions:
        [sample] = client.get(f"/v1/sessions/{name}/samples").json()["samples"]
        [turn] = sample["turns"]
        true, spans = _spans_of(sampled[name]), turn["weight_versions"]
        versions = {span[0] for span in true}
        if turn.get("weights_uncertain", False):
            assert versions <= {span[0] for span in spans}, (name, spans, true)
            kinds["uncertain"] += 1
        else:
            assert spans == true, (name, spans, true)
            kinds["mixed" if len(versions) > 1 else "pure"] += 1
    return kinds


def _spans_of(sampled: list[str]) -> list[list[Any]]:
    """What an engine sampled, as `weight_versions` has it."""
    spans: list[list[Any]] = []
    for position, version in enumerate(sampled):
        if not spans or spans[-1][0] != version:
            spans.append([version, position, position])
        spans[-1][2] = position + 1
    return spans


_CALLS = {
    ("POST", "/pause"): "_pause",
    ("POST", "/resume"): "_resume",
    ("GET", "/is_paused"): "_is_paused",
    ("POST", "/abort_requests"): "_abort",
    ("POST", "/init_weight_transfer_engine"): "_init",
    ("POST", "/shutdown_weight_transfer_engine"): "_shutdown",
    ("POST", "/start_weight_update"): "_start_update",
    ("POST", "/start_draft_weight_update"): "_start_update",
    ("POST", "/update_weights"): "_update",
    ("POST", "/finish_weight_update"): "_finish_update",
    ("POST", "/update_weight_version"): "_name",
    ("GET", "/weight_info"): "_weight_info",
    ("GET", "/get_world_size"): "_world_size",
    ("POST", "/reset_prefix_cache"): "_reset",
    ("POST", "/sleep"): "_sleep",
    ("POST", "/wake_up"): "_wake_up",
    ("GET", "/is_sleeping"): "_is_sleeping",
    ("POST", "/collective_rpc"): "_rpc",
    ("POST", "/v1/load_lora_adapter"): "_load",
    ("POST", "/v1/unload_lora_adapter"): "_unload",
}
