"""One engine of the fleet: what it can do, and whether it answers."""

import asyncio
import logging
import time
from dataclasses import replace
from typing import Any

from proxy.engine.discovery import (
    NO_TOKEN_IN,
    Capabilities,
    CredentialWanted,
    Model,
    alive,
    discover,
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
LOAD_AGAIN_S = 30.0
"""How long after a tokenizer could not be had it is tried again: a hub may have been out of reach."""


class Replica:
    """An engine, watched by a task of its own.

    Ready means: it answered, and what it can do is known. A replica that stops answering is asked
    anew when it comes back, because another version with other flags may have come in its place.
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
        self._failed_at: float | None = None
        self._token_in = token_in
        self._interval_s = watch_interval_s
        self._problem = "not asked yet"
        self._credential: tuple[bytes, bytes] | None = None
        self.wants_credential = False
        """Whether it cannot be asked what it can do without a credential that it accepts."""
        self._asked = asyncio.Event()
        self._suspect = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        """Whether requests may go here."""
        return self.capabilities is not None

    def known(self) -> Capabilities:
        """What the engine can do.

        Raises:
            EngineUnavailable: it is not known, or the engine went away meanwhile.
        """
        if self.capabilities is None:
            raise EngineUnavailable(self._problem)
        return self.capabilities

    @property
    def _asked_engine(self) -> Engine:
        """The engine for the proxy's own questions: with a client's credential where it wants one."""
        if self._credential is None:
            return self.engine
        return EngineWithCredential(self.engine, self._credential)

    async def lend_credential(self, credential: tuple[bytes, bytes]) -> None:
        """Ask an engine that wants a credential what it can do, with one that it accepts from a client."""
        if self.wants_credential:
            self.wants_credential = False
            self._credential = credential
            await self._ask()

    def start(self) -> None:
        """Begin to watch. Must be called inside a running event loop."""
        self._watcher = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Stop watching and close connections."""
        tasks = [task for task in (self._watcher, self._tokenizer) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self.engine.aclose()

    async def asked(self) -> None:
        """Wait until the engine was asked once, whatever came of it."""
        await self._asked.wait()

    def mark_down(self, problem: ApiError) -> None:
        """Nothing listens there any more."""
        if self.capabilities is not None:
            log.warning("%s is down: %s", self.engine.name, problem.message)
        self.capabilities = None
        self._problem = problem.message
        self._suspect.set()

    def suspect(self) -> None:
        """Something broke there: ask for its health now instead of at the next interval."""
        self._suspect.set()

    async def serves(self, model: str) -> bool:
        """Whether the engine knows a model of that name, base or LoRA; the list is asked for again if not."""
        known = self.known()
        if model in known.models:
            return True
        models = await list_models(self._asked_engine)
        if self.capabilities is known:
            self.capabilities = replace(known, models=tuple(m.name for m in models))
        return any(m.name == model for m in models)

    async def tokenizer(self) -> ChatTokenizer:
        """The tokenizer for this engine's model, checked against the engine.

        Raises:
            Unsupported: there is none that can be trusted; the message says what to set.
            EngineUnavailable: the engine went away.
        """
        known = self.known()
        again = self._failed_at is not None and time.monotonic() - self._failed_at >= LOAD_AGAIN_S
        if self._tokenizer is None or again or _went_away(self._tokenizer):
            self._failed_at = None
            self._tokenizer = self._load_tokenizer(known.model)
        return await asyncio.shield(self._tokenizer)

    def report(self) -> dict[str, Any]:
        """This replica's part of `GET /ready`."""
        known = self.capabilities
        if known is None:
            return {"engine": self.engine.name, "ready": False, "problem": self._problem}
        report: dict[str, Any] = {
            "engine": self.engine.name,
            "ready": True,
            "version": known.version,
            "model": known.model.name if known.model else None,
            "token_in": known.token_in.name if known.token_in else None,
        }
        if known.token_in is None:
            report["problem"] = NO_TOKEN_IN
        task = self._tokenizer
        if task is None or not task.done():
            report["append"] = "loading"
        else:
            error = task.exception()
            report["append"] = "ready" if error is None else str(error)
            if error is None:
                cache = task.result().cache_info()
                report["append_cache"] = {"hits": cache.hits, "misses": cache.misses}
        return report

    async def _watch(self) -> None:
        while True:
            if self.capabilities is None:
                await self._ask()
            pause = self._interval_s if self.ready else RETRY_S
            self._suspect.clear()
            try:
                async with asyncio.timeout(pause):
                    await self._suspect.wait()
            except TimeoutError:
                pass
            if self.ready and not await self._well():
                self.mark_down(EngineUnavailable(f"{self.engine.name} does not answer /health"))

    async def _well(self) -> bool:
        """Whether the engine says, in time, that it is healthy."""
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                return await alive(self.engine)
        except TimeoutError:
            return False

    async def _ask(self) -> None:
        try:
            async with asyncio.timeout(DISCOVERY_TIMEOUT_S):
                if not await self._well():
                    raise EngineUnavailable(f"{self.engine.name} does not answer /health")
                known = await discover(self._asked_engine, self._token_in)
        except CredentialWanted as error:
            self._problem, self.wants_credential = error.message, True
        except ApiError as error:
            self._problem = error.message
        except TimeoutError:
            self._problem = f"{self.engine.name} did not answer within {DISCOVERY_TIMEOUT_S:.0f} s"
        except Exception as error:
            log.exception("asking %s what it can do failed", self.engine.name)
            self._problem = f"{self.engine.name}: {type(error).__name__}: {error}"
        else:
            known = replace(known, logprobs_mode=known.logprobs_mode or self._logprobs_mode)
            self._announce(known)
            self.capabilities = known
            self._tokenizer = self._load_tokenizer(known.model)
        if self.capabilities is None and not self._asked.is_set():
            log.warning("%s is not ready: %s", self.engine.name, self._problem)
        self._asked.set()

    def _load_tokenizer(self, model: Model | None) -> "asyncio.Task[ChatTokenizer]":
        task = asyncio.create_task(self._tokenizers.for_engine(self._asked_engine, model))
        task.add_done_callback(self._tokenizer_loaded)
        return task

    def _tokenizer_loaded(self, task: "asyncio.Task[ChatTokenizer]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed_at = time.monotonic()
            log.warning("%s: nothing can be appended: %s", self.engine.name, error)

    def _announce(self, known: Capabilities) -> None:
        spelling = known.token_in.name if known.token_in else "none"
        log.info(
            "%s is ready: vLLM %s, model %s, takes exact prompts by: %s",
            self.engine.name,
            known.version,
            known.model.name if known.model else "unknown",
            spelling,
        )
        if known.token_in is None:
            log.warning("%s: %s", self.engine.name, NO_TOKEN_IN)


def _went_away(task: "asyncio.Task[ChatTokenizer]") -> bool:
    """Whether loading failed for want of an engine; what is unsupported stays so."""
    if not task.done() or task.cancelled():
        return task.cancelled()
    error = task.exception()
    return error is not None and not isinstance(error, Unsupported)
