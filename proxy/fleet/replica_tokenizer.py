"""The tokenizer of one replica, loaded in the background."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from proxy.engine.discovery import Model
from proxy.engine.protocol import Engine
from proxy.errors import EngineUnavailable, Unsupported
from proxy.fleet.tokenizers import Tokenizers
from tokenization import ChatTokenizer

log = logging.getLogger("tokenproxy")

RETRY_S = 30.0
"""After loading failed, how long until the next attempt: a hub may have been unreachable."""


class ReplicaTokenizer:
    """Loads the tokenizer of a replica's model; all requests wait for one load."""

    def __init__(
        self, name: str, tokenizers: Tokenizers, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Nothing is loaded yet; `name` is the replica's, for messages."""
        self._clock = clock
        self._name = name
        self._tokenizers = tokenizers
        self._task: asyncio.Task[ChatTokenizer] | None = None
        self._failed_at: float | None = None

    def load(self, engine: Engine, model: Model | None) -> None:
        """Start to load, also if it was loaded before: the engine may have changed."""
        self._failed_at = None
        self._task = asyncio.create_task(self._tokenizers.for_engine(engine, model))
        self._task.add_done_callback(self._loaded)

    async def get(self, engine: Engine, model: Model | None) -> ChatTokenizer:
        """The tokenizer, loaded again if that failed some time ago or because of the engine.

        Raises:
            Unsupported: it cannot be loaded, or differs from the engine's; the message names what to set.
            EngineUnavailable: the engine stopped responding.
        """
        retry_due = self._failed_at is not None and self._clock() - self._failed_at >= RETRY_S
        if self._task is None or retry_due or _engine_failed(self._task):
            self.load(engine, model)
        task, current = self._task, asyncio.current_task()
        assert task is not None
        try:
            # several requests wait for one load: the cancellation of one must not cancel it
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and current is not None and not current.cancelling():
                raise EngineUnavailable(f"{self._name} left the fleet") from None
            raise

    @property
    def loaded(self) -> ChatTokenizer | None:
        """The tokenizer, if it was loaded and suits the engine."""
        task = self._task
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result()

    async def stop(self) -> None:
        """Stop loading."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def report(self) -> dict[str, Any]:
        """Whether messages can be appended, what the template's proof found, and the use of the cache."""
        task, tokenizer = self._task, self.loaded
        if task is None or not task.done() or task.cancelled():
            return {"append": "loading"}
        if tokenizer is None:
            return {"append": str(task.exception())}
        cache = tokenizer.cache_info()
        return {
            "append": "ready",
            "template": _template_report(tokenizer),
            "append_cache": {"hits": cache.hits, "misses": cache.misses},
        }

    def _loaded(self, task: "asyncio.Task[ChatTokenizer]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed_at = self._clock()
            log.warning("%s: messages cannot be appended to ids: %s", self._name, error)


def _template_report(tokenizer: ChatTokenizer) -> dict[str, str]:
    """What decides the text after a turn; empty until the template was examined."""
    proof = tokenizer.proof
    if proof is None:
        return {}
    return {
        "after_messages": str(proof.after_messages),
        "after_results": str(proof.after_results),
        "reason": proof.reason,
    }


def _engine_failed(task: "asyncio.Task[ChatTokenizer]") -> bool:
    """Whether loading failed because of the engine. An unsupported tokenizer stays unsupported."""
    if not task.done() or task.cancelled():
        return task.cancelled()
    error = task.exception()
    return error is not None and not isinstance(error, Unsupported)
