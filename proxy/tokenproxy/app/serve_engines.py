"""Engines in a Ray cluster: how the proxy finds them by name, and how Ray Serve runs them.

A name in `upstreams`, as `ray-actor://vllm-`, stands for all living actors of the cluster whose names begin
with it. Each is asked for its address, by the method `url` or the one after a slash, as in
`ray-actor://server_/get_address`.

vLLM runs as the server that it is, in a process of its own below a deployment of Ray Serve: `ray.serve.llm`
would replace vLLM's API server, and with it the routes of the plugin.
"""

import asyncio
import json
import logging
import shlex
import subprocess
import sys
import uuid
from typing import Any

import httpx
import ray
from pydantic import BaseModel, ConfigDict, Field, field_validator
from ray import serve
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.serve import Application
from ray.util import get_node_ip_address, list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tokenproxy.app.children import GRACE_S, child_environment, free_port
from tokenproxy.base.urls import ACTOR_SCHEME, UpstreamsError, normalise_base_url
from tokenproxy.fleet.membership import resolve_host

log = logging.getLogger("tokenproxy")

ENGINES = f"{ACTOR_SCHEME}://tokenproxy-engine:"
"""The upstream that stands for the engines of `run_engines` in the application that asks."""
_METHOD = "url"
_ASK_S = 5.0
"""Seconds in which an actor should tell its address, and an engine that it is healthy."""
_POLL_S = 0.5
_LEAVES_S = 10.0
"""Seconds between the end of an engine's name and its own: proxies look every `watch_interval_s`."""


class EngineArguments(BaseModel):
    """The engines that Ray Serve runs. Read from JSON where the arguments are strings."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(description="folder or hub name")
    replicas: int = Field(default=1, ge=1, description="number of engines")
    flags: list[str] = Field(default=[], description="flags of `vllm serve`: a list, or as in a shell")
    gpus: float = Field(default=1.0, ge=0, description="GPUs of one engine; 0 for a vLLM on the CPU")
    cpus: float = Field(default=1.0, ge=0, description="CPUs of one engine")
    plugin: bool = Field(default=True, description="with the token routes inside vLLM, too")
    environment: dict[str, str] = Field(default={}, description="variables of its process")
    start_timeout_s: float = Field(default=1800.0, gt=0, description="seconds until it must be healthy")

    @field_validator("flags", mode="before")
    @classmethod
    def _split(cls, flags: object) -> object:
        return shlex.split(flags) if isinstance(flags, str) else flags

    @field_validator("flags", mode="after")
    @classmethod
    def _without_keys(cls, flags: list[str]) -> list[str]:
        if any(flag.partition("=")[0] == "--api-key" for flag in flags):
            raise ValueError(
                "Ray's dashboard shows --api-key: set VLLM_API_KEY in the environment of `ray start`"
            )
        return flags


def read_engines(value: object) -> object:
    """Engines that were given as JSON text.

    Raises:
        ValueError: the text is not JSON.
    """
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"not an object in JSON: {error}") from error


class ActorEngines:
    """Finds the engines of Ray actors by the actors' names. One per application."""

    def __init__(self) -> None:
        self._told: dict[str, str] = {}
        """What each actor told last."""
        self._asked: dict[str, asyncio.Task[Any]] = {}
        """Calls of actors that have not answered yet: those are not asked again."""
        self._problems: dict[str, str] = {}

    async def resolve(self, url: str) -> list[str]:
        """The URLs of the engines that a name among the upstreams stands for, sorted.

        An actor that does not answer counts with what it told before, and not at all if that is nothing.

        Raises:
            UpstreamsError: Ray cannot list its actors, or a host has no address.
        """
        prefix, _, name = url.partition("://")
        if prefix != ACTOR_SCHEME:
            return await resolve_host(url)
        if url == ENGINES:
            name = _own_prefix()
        name, _, method = name.partition("/")
        try:
            actors = await asyncio.to_thread(_actors, name)
        except (RayError, ConnectionError) as error:
            raise UpstreamsError(f"Ray cannot list its actors: {error}") from error
        found = await asyncio.gather(
            *(self._address(actor, handle, method or _METHOD) for actor, handle in actors.items())
        )
        for kept in (self._told, self._problems, self._asked):
            for ended in [actor for actor in kept if actor.startswith(name) and actor not in actors]:
                kept.pop(ended)
        return sorted({address for address in found if address is not None})

    async def _address(self, actor: str, handle: Any, method: str) -> str | None:
        """The base URL that an actor tells, or told before; None if it ended or never told one."""
        try:
            call = self._asked.get(actor)
            if call is None:
                call = self._asked[actor] = asyncio.create_task(_call(getattr(handle, method)))
            if not (await asyncio.wait([call], timeout=_ASK_S))[0]:
                raise TimeoutError(f"it does not answer within {_ASK_S:.0f} s")
            del self._asked[actor]
            told = call.result()
            self._told[actor] = normalise_base_url(told if isinstance(told, str) else _joined(told))
            self._problems.pop(actor, None)
        except AttributeError:
            self._report(actor, f"it has no method {method}: name one after a slash")
        except ActorUnavailableError as error:
            self._report(actor, _last_line(error))
        except RayActorError:
            return None
        except (RayError, TimeoutError) as error:
            self._report(actor, _last_line(error))
        except (TypeError, ValueError) as error:
            self._report(actor, f"{method} returns no URL: {error}")
        return self._told.get(actor)

    def _report(self, actor: str, problem: str) -> None:
        if self._problems.get(actor) != problem:
            log.error("the actor %s does not tell where its engine is: %s", actor, problem)
        self._problems[actor] = problem


def _last_line(error: Exception) -> str:
    """What an error says, without the traceback from its actor."""
    return (str(error).strip() or repr(error)).splitlines()[-1]


async def _call(method: Any) -> Any:
    return await method.remote()


def _own_prefix() -> str:
    """The beginning of the names of the engines of this replica's application."""
    return f"{ENGINES.partition('://')[2]}{serve.get_replica_context().app_name}:"


def _actors(name: str) -> dict[str, Any]:
    """The handles of the living actors whose names begin with `name`, in all namespaces."""
    handles = {}
    for actor in list_named_actors(all_namespaces=True):
        if actor["name"].startswith(name):
            try:
                handles[actor["name"]] = ray.get_actor(actor["name"], namespace=actor["namespace"])
            except ValueError:  # it has just ended
                continue
    return handles


def _joined(address: tuple[str, int]) -> str:
    host, port = address
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_engines(arguments: EngineArguments) -> Application:
    """Engines as a deployment of Ray Serve. `ENGINES` finds those that are healthy."""
    deployment = serve.deployment(
        Engine,
        name="Engine",
        num_replicas=arguments.replicas,
        ray_actor_options={"num_cpus": arguments.cpus, "num_gpus": arguments.gpus},
        graceful_shutdown_timeout_s=_LEAVES_S + GRACE_S + 10,
    )
    return deployment.bind(arguments)


class Name:
    """An actor that stands for a healthy engine. It ends with the replica that made it."""

    def __init__(self, url: str) -> None:
        self._url = url

    def url(self) -> str:
        """The engine's base URL."""
        return self._url


class Engine:
    """One vLLM server."""

    async def __init__(self, arguments: EngineArguments) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        """Start it, and wait until it is healthy.

        Raises:
            RuntimeError: it ended, or was not healthy in time.
        """
        host = get_node_ip_address()
        self._url = f"http://{host}:{free_port(host)}"
        self._process = await asyncio.to_thread(_start, arguments, self._url)
        self._client = httpx.AsyncClient(base_url=self._url, timeout=_ASK_S, trust_env=False)
        try:
            async with asyncio.timeout(arguments.start_timeout_s):
                while not await self._is_healthy():
                    self._check_alive()
                    await asyncio.sleep(_POLL_S)
        except BaseException:
            await asyncio.to_thread(self._end)
            raise
        self._name = self._named()

    async def check_health(self) -> None:
        """Ray Serve replaces the engine if this fails several times in a row."""
        self._check_alive()
        if not await self._is_healthy():
            raise RuntimeError(f"vLLM at {self._url} is not healthy")
        try:
            await asyncio.wait_for(_call(self._name.url), _ASK_S)
        except TimeoutError:
            log.warning("the name of the engine at %s does not answer", self._url)
        except RayActorError:
            self._name = self._named()

    async def __del__(self) -> None:
        """Give up the name, so that the engine gets no new requests, and end vLLM."""
        if hasattr(self, "_name"):
            ray.kill(self._name)
            await asyncio.sleep(_LEAVES_S)
        if hasattr(self, "_process"):
            await asyncio.to_thread(self._end)

    def _named(self) -> Any:
        """An actor that stands for the engine, on its node, under a new name."""
        node = ray.get_runtime_context().get_node_id()
        name = f"{_own_prefix()}{uuid.uuid4().hex}"
        options = {
            "name": name,
            "num_cpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        return ray.remote(Name).options(**options).remote(self._url)

    def _end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _check_alive(self) -> None:
        code = self._process.poll()
        if code is not None:
            raise RuntimeError(f"vLLM ended with code {code}; its output is in the log of this replica")

    async def _is_healthy(self) -> bool:
        try:
            return (await self._client.get("/health")).status_code == 200
        except httpx.HTTPError:
            return False


def _start(arguments: EngineArguments, url: str) -> "subprocess.Popen[bytes]":
    """Start vLLM. It ends when the pipe to it closes."""
    environment = child_environment() | arguments.environment  # GPUs as Ray assigned them
    command = _command(arguments, url)
    # not in the process group of Ray, whose end it survives for as long as vLLM needs to end
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True)


def _command(arguments: EngineArguments, url: str) -> list[str]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    command = ["tokenproxy", "vllm"] if arguments.plugin else ["vllm.entrypoints.cli.main", "serve"]
    address = ["--host", host, "--port", port]
    python = [sys.executable, "-m"]
    started = [*python, *command, arguments.model, *address, *arguments.flags]
    return [*python, "tokenproxy.app.children", *started]
