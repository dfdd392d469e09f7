"""One engine of the fleet: what it supports, and whether it responds."""

import asyncio
import logging
import time
from dataclasses import replace
from typing import Any

from proxy.engine.discovery import (
    NO_TOKEN_IN,
    Capabilities,
    CredentialRequired,
    Model,
    discover,
    is_healthy,
    list_models,
)
from proxy.engine.protocol import Engine, EngineWithCredential
from proxy.errors import ApiError, EngineUnavailable, Unsupported
from proxy.fleet.tokenizers import Tokenizers
from tokenization import ChatTokenizer

log = logging.getLogger("tokenproxy")

DISCOVERY_TIMEOUT_S = 60.0
HEALTH_TIMEOUT_S = 5.0
RETRY_S = 1.0
TOKENIZER_RETRY_S = 30.0
"""After a tokenizer failed to load, how long until the next attempt: a hub may have been unreachable."""


class Replica:
    """An engine and the task that watches it.

    It is ready if it responds and its capabilities are known. After an outage discovery runs again, because
    the engine may have been restarted as another version or with other flags.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizers: Tokenizers,
        token_in: str,
        watch_interval_s: float,
        logprobs_mode: str = "",
    ) -> None:
        """`logprobs_mode` is that of an engine that is known to have it; others are asked."""
        self._logprobs_mode = logprobs_mode
        self.engine = engine
        self.capabilities: Capabilities | None = None
        self._tokenizers = tokenizers
        self._tokenizer: asyncio.Task[ChatTokenizer] | None = None
        self._load_failed_at: float | None = None
        self._token_in = token_in
        self._interval_s = watch_interval_s
        self._problem = "not asked yet"
        self._credential: tuple[bytes, bytes] | None = None
        self.wants_credential = False
        """Whether the engine refuses discovery without a credential that it accepts."""
        self._discovered = asyncio.Event()
        self._check_due = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        """Whether requests may be sent to the engine."""
        return self.capabilities is not None

    def known(self) -> Capabilities:
        """The engine's capabilities.

        Raises:
            EngineUnavailable: they are not known: discovery failed, or the engine stopped responding.
        """
        if self.capabilities is None:
            raise EngineUnavailable(self._problem)
        return self.capabilities

    @property
    def _engine_with_credential(self) -> Engine:
        """The engine for the proxy's own requests: with a client's credential, if one was lent."""
        if self._credential is None:
            return self.engine
        return EngineWithCredential(self.engine, self._credential)

    async def lend_credential(self, credential: tuple[bytes, bytes]) -> None:
        """Repeat discovery with a credential that the engine accepted from a client, if it requires one."""
        if self.wants_credential:
            self.wants_credential = False
            self._credential = credential
            await self._discover()

    def start(self) -> None:
        """Start watching. Call it inside a running event loop."""
        self._watcher = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Stop watching and close connections."""
        tasks = [task for task in (self._watcher, self._tokenizer) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self.engine.aclose()

    async def wait_discovered(self) -> None:
        """Wait until the first discovery ended, with or without success."""
        await self._discovered.wait()

    def mark_down(self, problem: ApiError) -> None:
        """Take the replica out of use until discovery succeeds again: the engine accepts no connections."""
        if self.capabilities is not None:
            log.warning("%s is down: %s", self.engine.name, problem.message)
        self.capabilities = None
        self._problem = problem.message
        self._check_due.set()

    def check_now(self) -> None:
        """Check the engine's health now instead of at the next interval: a request to it failed."""
        self._check_due.set()

    async def serves(self, model: str) -> bool:
        """Whether the engine serves a model of that name, base or LoRA. Unknown names refetch the list."""
        capabilities = self.known()
        if model in capabilities.models:
            return True
        models = await list_models(self._engine_with_credential)
        # the engine may have gone down, or come back as another, during the request
        if self.capabilities is capabilities:
            self.capabilities = replace(capabilities, models=tuple(m.name for m in models))
        return any(m.name == model for m in models)

    async def tokenizer(self) -> ChatTokenizer:
        """The tokenizer for this engine's model, checked against the engine.

        Raises:
            Unsupported: it cannot be loaded, or differs from the engine's; the message names what to set.
            EngineUnavailable: the engine stopped responding.
        """
        capabilities = self.known()
        retry_due = (
            self._load_failed_at is not None and time.monotonic() - self._load_failed_at >= TOKENIZER_RETRY_S
        )
        if self._tokenizer is None or retry_due or _engine_failed(self._tokenizer):
            self._load_failed_at = None
            self._tokenizer = self._load_tokenizer(capabilities.model)
        # several requests wait for one load: the cancellation of one must not cancel it
        return await asyncio.shield(self._tokenizer)

    def report(self) -> dict[str, Any]:
        """This replica's part of `GET /ready`."""
        capabilities = self.capabilities
        if capabilities is None:
            return {"engine": self.engine.name, "ready": False, "problem": self._problem}
        report: dict[str, Any] = {
            "engine": self.engine.name,
            "ready": True,
            "version": capabilities.version,
            "model": capabilities.model.name if capabilities.model else None,
            "token_in": capabilities.token_in.name if capabilities.token_in else None,
        }
        if capabilities.token_in is None:
            report["problem"] = NO_TOKEN_IN
        task = self._tokenizer
        if task is None or not task.done():
            report["append"] = "loading"
        else:
            error = task.exception()
            report["append"] = "ready" if error is None else str(error)
            if error is None:
                report["template"] = _template_report(task.result())
                cache = task.result().cache_info()
                report["append_cache"] = {"hits": cache.hits, "misses": cache.misses}
        return report

    async def _watch(self) -> None:
        while True:
            if self.capabilities is None:
                await self._discover()
            pause = self._interval_s if self.ready else RETRY_S
            self._check_due.clear()
            try:
                async with asyncio.timeout(pause):
                    await self._check_due.wait()
            except TimeoutError:
                pass
            if self.ready and not await self._is_healthy():
                self.mark_down(EngineUnavailable(f"{self.engine.name} does not respond to /health"))

    async def _is_healthy(self) -> bool:
        """Whether the engine reports within `HEALTH_TIMEOUT_S` that it is healthy."""
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                return await is_healthy(self.engine)
        except TimeoutError:
            return False

    async def _discover(self) -> None:
        """Run discovery. On success the replica is ready and loads its tokenizer; else `_problem` is set."""
        try:
            async with asyncio.timeout(DISCOVERY_TIMEOUT_S):
                if not await self._is_healthy():
                    raise EngineUnavailable(f"{self.engine.name} does not respond to /health")
                capabilities = await discover(self._engine_with_credential, self._token_in)
        except CredentialRequired as error:
            self._problem, self.wants_credential = error.message, True
        except ApiError as error:
            self._problem = error.message
        except TimeoutError:
            self._problem = f"{self.engine.name} did not respond within {DISCOVERY_TIMEOUT_S:.0f} s"
        except Exception as error:
            # the boundary of the task: an engine's response must not end the watch
            log.exception("discovering what %s supports failed", self.engine.name)
            self._problem = f"{self.engine.name}: {type(error).__name__}: {error}"
        else:
            capabilities = replace(
                capabilities, logprobs_mode=capabilities.logprobs_mode or self._logprobs_mode
            )
            self._log_capabilities(capabilities)
            self.capabilities = capabilities
            self._tokenizer = self._load_tokenizer(capabilities.model)
        if self.capabilities is None and not self._discovered.is_set():
            log.warning("%s is not ready: %s", self.engine.name, self._problem)
        self._discovered.set()

    def _load_tokenizer(self, model: Model | None) -> "asyncio.Task[ChatTokenizer]":
        task = asyncio.create_task(self._tokenizers.for_engine(self._engine_with_credential, model))
        task.add_done_callback(self._tokenizer_loaded)
        return task

    def _tokenizer_loaded(self, task: "asyncio.Task[ChatTokenizer]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._load_failed_at = time.monotonic()
            log.warning("%s: messages cannot be appended to ids: %s", self.engine.name, error)

    def _log_capabilities(self, capabilities: Capabilities) -> None:
        spelling = capabilities.token_in.name if capabilities.token_in else "none"
        log.info(
            "%s is ready: vLLM %s, model %s, exact prompts by route: %s",
            self.engine.name,
            capabilities.version,
            capabilities.model.name if capabilities.model else "unknown",
            spelling,
        )
        if capabilities.token_in is None:
            log.warning("%s: %s", self.engine.name, NO_TOKEN_IN)


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
