"""A fake vLLM whose weights can be updated: the development routes of vLLM, with its contracts.

While it is paused it samples nothing. It remembers under which version it sampled each id, so that a test can
compare what the proxy recorded.
"""

import asyncio
import threading
from collections import Counter, defaultdict
from typing import Any

import httpx
from aiohttp import web

from tests.support.fake_vllm import FakeVllm, Seen
from tests.support.fake_wire import Reply, data_of, error_body
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
        self.refuses_while_paused = False
        """Whether it refuses new requests in a pause that keeps none, as vLLM does from 0.33 on."""
        self.refused = 0
        """Number of requests that it refused so."""
        self.waits_at: int | None = None
        """Number of ids after which each turn waits for other weights."""
        self.sampled: defaultdict[str, list[str]] = defaultdict(list)
        """By session: the weights that sampled each id."""

    async def _answer(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        if seen.path in self.refuses:
            return web.json_response({"error": "refused"}, status=self.refuses[seen.path])
        if (
            self.refuses_while_paused
            and self.paused in ("abort", "wait")
            and seen.path.startswith("/v1/chat")
        ):
            self.refused += 1
            return _refusal(streams=bool(seen.json.get("stream")))
        answer = self._control(request, seen) or self._adapter(seen) or await self._transfer(seen)
        if answer is None:
            return await super()._answer(request, seen)
        return answer if isinstance(answer, web.Response) else web.json_response(answer)

    def _control(self, request: web.Request, seen: Seen) -> Any:
        """Calls that pause the engine, and those that tell about it."""
        match seen.method, seen.path:
            case "POST", "/pause":
                self.paused = request.query.get("mode", "abort")
                clears = "false" if self.paused == "keep" else "true"
                self.cached = self.cached and request.query.get("clear_cache", clears) != "true"
                return {"status": "paused"}
            case "POST", "/resume":
                self.paused = ""
                return {"status": "resumed"}
            case "GET", "/is_paused":
                return {"is_paused": bool(self.paused)}
            case "POST", "/sleep":
                self.paused, self.cached = "sleep", False
                return {"status": "sleeping", "level": int(request.query.get("level", "1"))}
            case "POST", "/wake_up":
                awake = "tags" not in request.query
                self.paused = "" if awake else self.paused
                return {"status": "awake" if awake else "sleeping", "tags": None}
            case "GET", "/is_sleeping":
                return {"is_sleeping": bool(self.paused)}
            case "POST", "/abort_requests":
                return {"status": "aborted", "aborted": self.running}
            case "POST", "/reset_prefix_cache":
                self.cached = self.cached and self.running > 0
                return {"success": not self.running}
            case "GET", "/get_world_size":
                return {"world_size": self.workers}
            case "POST", "/collective_rpc":
                return {"results": [f"{self.port}/{worker}" for worker in range(self.workers)]}
        return None

    def _adapter(self, seen: Seen) -> web.Response | None:
        """Calls that load and unload adapters."""
        match seen.method, seen.path:
            case "POST", "/v1/load_lora_adapter":
                name = seen.json["lora_name"]
                if name in self.adapters:
                    return web.json_response({"error": {"message": "already loaded"}}, status=400)
                self.adapters.add(name)
                return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")
            case "POST", "/v1/unload_lora_adapter":
                self.adapters.discard(seen.json["lora_name"])
                return web.Response(text="Success")
        return None

    async def _transfer(self, seen: Seen) -> Any:
        """Calls that change the weights and their version."""
        match seen.method, seen.path:
            case "POST", "/init_weight_transfer_engine":
                self.init_info = seen.json["init_info"]
                first = self.init_info["rank_offset"]
                await self._meet(list(range(first, first + self.workers)))
                return {"message": "Weight transfer initialized"}
            case "POST", "/shutdown_weight_transfer_engine":
                self.init_info = {}
                return {"message": "Weight transfer shut down"}
            case "POST", "/start_weight_update" | "/start_draft_weight_update":
                self.updating = True
                return {"message": "Weight update started"}
            case "POST", "/update_weights" | "/finish_weight_update" if not self.updating:
                raise web.HTTPInternalServerError(text="start_weight_update must be called before.")
            case "POST", "/update_weights":
                self.update_info = seen.json["update_info"]
                await self._meet([])
                info = self.update_info
                # TRL names tensors and no version
                self.weights = str(info.get("weights", "tensors")) if isinstance(info, dict) else "list"
                return {"message": "Weights updated"}
            case "POST", "/finish_weight_update":
                self.updating = False
                self.version = ((seen.body and seen.json) or {}).get("weight_version") or self.version
                return {"message": "Weight update finished"}
            case "POST", "/update_weight_version":
                self.version = seen.json["new_version"]
                return {"success": True, "new_version": self.version}
            case "GET", "/weight_info":
                return {"weight_version": self.version}
        return None

    async def _meet(self, ranks: list[int]) -> None:
        meeting = self.rendezvous.come(ranks)
        while not self.rendezvous.is_complete(meeting):  # noqa: ASYNC110 - they have several event loops
            await asyncio.sleep(_STEP_S)

    async def _before(self, request: web.Request, reply: Reply, event: bytes) -> None:
        """An answer is sampled id by id, as long as the engine is not paused."""
        for _ in _ids_of(event) if event.startswith(b"data: ") else reply.ids:
            await self._sample(request.headers.get("x-session-id", ""), reply.pause_s)

    async def _sample(self, session: str, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        waits = session and len(self.sampled[session]) == self.waits_at
        while self.paused or (waits and self.weights == "default"):  # noqa: ASYNC110 - set from other threads
            await asyncio.sleep(_STEP_S)
        if session:
            self.sampled[session].append(self.weights)


def _refusal(*, streams: bool) -> web.Response:
    """The answer to a request in a pause; that to a stream was begun before the engine refused."""
    message = "Generation is paused. Please retry after it resumes."
    body = error_body(message, "ServiceUnavailableError", None, 503)
    if streams:
        return web.Response(body=b"data: " + body + b"\n\ndata: [DONE]\n\n", content_type="text/event-stream")
    return web.Response(body=body, status=503, content_type="application/json")


def _ids_of(event: bytes) -> list[int]:
    choices = [choice for chunk in data_of(event) for choice in chunk["choices"]]
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
