"""What a wire format is: a path, and a function from a request to an answer."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from proxy.engine.protocol import Answer
from proxy.fleet.fleet import Fleet
from proxy.rollout.retries import Retries
from proxy.rollout.rollouts import Rollouts
from proxy.types import Headers

T = TypeVar("T")


@dataclass(slots=True)
class Incoming:
    """A request of a client, its body read."""

    method: str
    path: str
    """As it arrived: percent-encoded, with the query string."""
    headers: Headers
    body: bytes


@dataclass(slots=True)
class Gateway:
    """What the dialects work with; one per application."""

    fleet: Fleet
    encoders: ThreadPoolExecutor
    """Threads that tokenise: the event loop never does."""
    body_limit_bytes: int
    rollouts: Rollouts
    retries: Retries
    record_logprobs: bool = True
    """Whether log-probabilities are asked of the engine for the record, though no client wants them."""

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` on an encoder thread."""
        return await asyncio.get_running_loop().run_in_executor(self.encoders, work)


class Dialect(ABC):
    """One wire format."""

    path: ClassVar[str]
    """Route template in Starlette's syntax."""
    methods: ClassVar[tuple[str, ...]] = ("POST",)
    inside_vllm: ClassVar[bool] = True
    """Whether it is mounted inside vLLM too; False where vLLM's own route serves."""
    catches_all: ClassVar[bool] = False
    summary: ClassVar[str] = ""
    openapi: ClassVar[dict[str, Any]] = {}
    """What the OpenAPI page shows, beside path and methods."""

    @abstractmethod
    async def answer(self, incoming: Incoming, gateway: Gateway) -> Answer:
        """Answer a request.

        Raises:
            ApiError: becomes the error object that the client gets.
        """

    @property
    def description(self) -> str:
        """What the OpenAPI page says of the route."""
        return type(self).answer.__doc__ or ""
