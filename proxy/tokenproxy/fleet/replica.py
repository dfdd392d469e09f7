"""One engine of the fleet: what it supports, and whether it responds."""

import asyncio
import contextlib
import errno
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from chat_tokenizer import ChatTokenizer
from tokenproxy.base.errors import (
    ApiError,
    EngineBroken,
    EngineTimeout,
    EngineUnavailable,
    OutOfSockets,
    Unsupported,
)
from tokenproxy.base.http import Request
from tokenproxy.base.tasks import end_tasks
from tokenproxy.engine.discovery import NO_TOKEN_IN, Capabilities, CredentialRequired, discover, list_models
from tokenproxy.engine.protocol import Engine, EngineWithCredential, fetch
from tokenproxy.fleet.admission import CacheUse
from tokenproxy.fleet.load import Breaker, Load
from tokenproxy.fleet.tokenizers import Tokenizers
from tokenproxy.monitoring.metrics import Metrics, ReplicaState

if TYPE_CHECKING:
    from tokenproxy.fleet.fleet import Fleet

log = logging.getLogger("tokenproxy")

DISCOVERY_TIMEOUT_S = 60.0
HEALTH_TIMEOUT_S = 5.0
"""Also for another attempt to load the tokenizer, which health checks wait for."""
TOKENIZER_TIMEOUT_S = 20.0
"""Longer than it takes to load a tokenizer of this machine. Nothing waits for one that is downloaded."""
TOKENIZER_RETRY_S = 30.0
"""After loading failed, seconds until the next attempt: a hub may have been unreachable."""
CONFIRM_TIMEOUT_S = 2.0
MISSES = 2
"""Health checks in a row without an answer that take a replica out of use; a refused connection is enough."""
RETRY_S = 0.5
"""Seconds until the next check of a replica that is not ready, or missed a check."""
LACKS_S = 10.0
"""Seconds for which a replica that lacks an adapter gets no requests for it."""
_NO_ROUTE = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT})


class Replica:
    """An engine and the task that watches it.

    It responds if discovery found its capabilities, and is ready if these are also those of the model that
    its fleet serves. After an outage discovery runs again, because the engine may have been restarted as
    another version or with other flags.
    """

    fleet: "Fleet"
    """The fleet to which it was added, which also starts it."""

    def __init__(
        self,
        engine: Engine,
        tokenizers: Tokenizers,
        metrics: Metrics,
        watch_interval_s: float,
        logprobs_mode: str = "",
        retry_s: float = RETRY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A replica that is not watched yet.

        Args:
            metrics: where its state is reported.
            logprobs_mode: the engine's, where its process knows it; otherwise discovery finds it.
            retry_s: seconds until the next check while it is not ready, or after a missed check.
            clock: the time that the event loop's own waits follow.
        """
        self._retry_s = retry_s
        self._logprobs_mode = logprobs_mode
        self.metrics = metrics
        self._reported: tuple[ReplicaState, int] | None = None
        self.engine = self.questions = engine
        """`questions`: for the proxy's own requests, with a client's credential if one was lent."""
        self.name = engine.name
        self.load = Load(clock)
        self.cache = CacheUse()
        self.breaker = Breaker(clock)
        self.draining = False
        """Whether it gets no more requests, and those that run end."""
        self._lacking: dict[str, float] = {}
        """When it answered 404 for a model that another replica serves, by the model's name."""
        self.capabilities: Capabilities | None = None
        self.tokenizer: ChatTokenizer | None = None
        """The tokenizer that renders the same ids as the engine; None if there is none."""
        self.tokenizer_problem: Unsupported | None = None
        """Why there is none; the message names what to set."""
        self._tokenizers = tokenizers
        self._tokenizer_retry_at = 0.0
        self.difference = ""
        """How it differs from the model that its fleet serves; empty if it does not."""
        self._clock = clock
        self._interval_s = watch_interval_s
        self.problem = "not checked yet"
        """Why it is not ready."""
        self.wants_credential = False
        """Whether the engine refuses discovery without a credential that it accepts."""
        self.was_tried = False
        """Whether the first discovery ended, with or without success."""
        self.check_due = asyncio.Event()
        """Set where its health is to be checked now instead of at the next interval: a request failed."""
        self._watcher: asyncio.Task[None] | None = None
        self.weight_version: str | None = None
        """The version of its weights; None if its engine reports none."""
        self.ask_version_at = 0.0
        """When to ask for it again: without VLLM_SERVER_DEV_MODE an engine answers 404."""
        self._confirmation: asyncio.Task[bool] | None = None
        self._misses = 0

    @property
    def responds(self) -> bool:
        """Whether the engine responds, and discovery found its capabilities."""
        return self.capabilities is not None

    @property
    def ready(self) -> bool:
        """Whether requests may be sent to the engine."""
        return self.capabilities is not None and not self.difference

    def require_capabilities(self) -> Capabilities:
        """The engine's capabilities.

        Raises:
            EngineUnavailable: there are none: discovery failed, or the engine stopped responding.
        """
        if self.capabilities is None:
            raise EngineUnavailable(self.problem)
        return self.capabilities

    async def lend_credential(self, credential: tuple[bytes, bytes]) -> None:
        """Repeat discovery with a credential that the engine accepted from a client, if it requires one."""
        if self.wants_credential:
            self.wants_credential = False
            self.questions = EngineWithCredential(self.engine, credential)
            await self._discover()

    def start(self) -> None:
        """Start watching. Call it inside a running event loop."""
        self.report_state()
        self._watcher = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Stop watching and close connections."""
        await end_tasks(self._watcher)
        if self._confirmation is not None:
            await asyncio.wait([self._confirmation])
        self._tokenizers.forget(self.questions)
        await self.engine.aclose()

    def mark_down(self, problem: ApiError) -> None:
        """Take the replica out of use until discovery succeeds again: the engine accepts no connections."""
        self.problem = problem.message
        self.check_due.set()
        if self.capabilities is None:
            return
        log.warning("%s is down: %s", self.name, problem.message)
        self.metrics.replica_ejected(self.name, "unreachable")
        self.capabilities = None
        self.cache.size = 0  # no conversation has room there any more
        self.engine.verify(None)
        self._tokenizers.forget(self.questions)
        self.fleet.settle_model()

    def note_lack(self, model: str) -> None:
        """Take note that it does not serve a model that another replica serves, and check what it serves."""
        self._lacking[model] = self._clock()
        self.check_due.set()

    def lacks(self, model: str) -> bool:
        """Whether requests for a model go to other replicas, because it lacked the model of late."""
        at = self._lacking.get(model)
        return at is not None and self._clock() - at < LACKS_S

    async def confirm(self) -> bool:
        """Whether the engine still responds after a connection broke; if not, the replica is marked down."""
        # all requests whose connections broke wait for one answer
        if self._confirmation is None or self._confirmation.done():
            self._confirmation = asyncio.create_task(self._confirm())
        return await asyncio.shield(self._confirmation)

    async def _confirm(self) -> bool:
        try:
            healthy = await self._is_healthy(CONFIRM_TIMEOUT_S)
        except OutOfSockets:
            healthy = True  # that tells nothing of the engine
        except EngineUnavailable:
            healthy = False
        # vLLM's API server outlives its engine for a moment, and answers 503
        if not healthy:
            self.mark_down(EngineUnavailable(f"{self.name} does not respond to /health"))
        return healthy

    async def _verify(self) -> None:
        """Check that the engine still serves the model that discovery found.

        Raises:
            EngineUnavailable: it serves another one, or does not report any; the replica is marked down.
            EngineTimeout: it does not answer in time.
        """
        expected = self.require_capabilities().model
        if expected is None:
            return
        silent = f"{self.name} does not report which model it serves"
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                models = await list_models(self.questions)
        except CredentialRequired:
            return  # there is no key to ask with
        except TimeoutError as error:
            raise EngineTimeout(silent) from error
        except EngineBroken:
            models = []
        if not models or models[0] != expected:
            another = f"{self.name} was restarted with another model: it is examined again"
            # the request was not sent, so it did not break the engine
            problem = EngineUnavailable(another if models else silent)
            self.mark_down(problem)
            raise problem

    async def serves(self, model: str) -> bool:
        """Whether the engine serves a model of that name, base or LoRA. Unknown names refetch the list."""
        capabilities = self.require_capabilities()
        if model in capabilities.models:
            return True
        models = await list_models(self.questions)
        # the engine may have gone down, or come back as another, during the request
        if self.capabilities is capabilities:
            self.capabilities = replace(capabilities, models=tuple(m.name for m in models))
        return any(m.name == model for m in models)

    async def _watch(self) -> None:
        while True:
            try:
                await (self._check() if self.responds else self._discover())
            except Exception:  # the boundary of the task: an engine's response must not end the watch
                log.exception("checking the health of %s failed", self.name)
            pause = self._interval_s if self.responds and not self._misses else self._retry_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self.check_due.wait()
            self.check_due.clear()

    async def _check(self) -> None:
        """Ask for the engine's health; several misses in a row mark the replica down."""
        try:
            if await self._is_healthy(HEALTH_TIMEOUT_S):
                self._misses = 0
                if self._lacking:
                    await self._verify()
                capabilities = self.capabilities
                if capabilities and not self.tokenizer and self._clock() >= self._tokenizer_retry_at:
                    await self._find_tokenizer(capabilities, HEALTH_TIMEOUT_S)
                    self.fleet.settle_model()
                if self.ready:
                    await self.fleet.weights.check(self)
            elif self._missed():
                self.mark_down(EngineUnavailable(f"{self.name} does not respond to /health"))
        except EngineUnavailable as error:
            self.mark_down(error)
        except ApiError:
            pass  # no socket is left, or the engine is busy: that tells nothing of its health

    def _missed(self) -> bool:
        """Count a health check without an answer; returns whether they suffice to mark the replica down."""
        if self.fleet.watch.was_late:
            return False  # the answer may have come in time
        self._misses += 1
        if self._misses < MISSES:
            return False
        # a machine that is gone breaks no connections; the replica may be down already for another reason
        self.load.give_up(asyncio.get_running_loop().time(), gone=True)
        return True

    async def _is_healthy(self, timeout_s: float) -> bool:
        """Whether the engine reports in time that it is healthy.

        Raises:
            EngineUnavailable: its machine refuses the connection: nothing listens there.
            OutOfSockets: this process cannot ask.
        """
        try:
            async with asyncio.timeout(timeout_s):
                status, _ = await fetch(self.engine, Request("GET", "/health"))
        except OutOfSockets:
            raise
        except EngineUnavailable as error:
            if getattr(error.__cause__, "errno", None) in _NO_ROUTE:
                return False  # the machine may be gone, and with it the requests that run there
            raise
        except (ApiError, TimeoutError):
            return False
        return status == 200

    async def _discover(self) -> None:
        """Run discovery, and find the tokenizer. On success the replica responds; else `problem` is set."""
        try:
            async with asyncio.timeout(DISCOVERY_TIMEOUT_S):
                if not await self._is_healthy(HEALTH_TIMEOUT_S):
                    self._missed()
                    raise EngineUnavailable(
                        f"{self.name} does not respond to /health: is this the base URL of a vLLM server?"
                    )
                capabilities = await discover(self.questions)
            self.problem = f"the tokenizer for {self.name} is still loading"
            is_here = self._tokenizers.are_here(capabilities.model)
            await self._find_tokenizer(capabilities, TOKENIZER_TIMEOUT_S if is_here else 0.0)
        except TimeoutError:
            self.problem = f"{self.name} did not respond within {DISCOVERY_TIMEOUT_S:.0f} s"
        except ApiError as error:
            self.problem, self.wants_credential = error.message, isinstance(error, CredentialRequired)
        except Exception as error:
            # the boundary of discovery: an engine may respond anything
            log.exception("discovering what %s supports failed", self.name)
            self.problem = f"{self.name}: {type(error).__name__}: {error}"
        else:
            mode = self._logprobs_mode or capabilities.logprobs_mode
            capabilities = replace(capabilities, logprobs_mode=mode)
            name = capabilities.model.name if capabilities.model else "unknown"
            log.info("%s responds: vLLM %s, model %s", self.name, capabilities.version, name)
            if capabilities.token_in is None:
                log.warning("%s: %s", self.name, NO_TOKEN_IN)
            if capabilities.logprobs_warning:
                log.warning("%s: %s", self.name, capabilities.logprobs_warning)
            await self.fleet.weights.greet(self)  # it may have been restarted with other weights
            self.capabilities = capabilities
            self.cache = CacheUse(*capabilities.cache)
            self.engine.verify(self._verify)
            self.breaker.reset()
            self.load.responded = False
            self._misses = 0
            self._lacking.clear()
        first_try, self.was_tried = not self.was_tried, True
        if self.capabilities is None and first_try:
            log.warning("%s is not ready: %s", self.name, self.problem)
        if self.capabilities is not None or first_try:
            self.fleet.settle_model()

    async def _find_tokenizer(self, capabilities: Capabilities, timeout_s: float) -> None:
        """Set the tokenizer of the engine's model, or why there is none. Raises ApiError."""
        problem: Unsupported | None = None
        self.tokenizer, self._tokenizer_retry_at = None, self._clock()
        try:
            async with asyncio.timeout(timeout_s):
                self.tokenizer = await self._tokenizers.find(self.questions, capabilities.model)
        except TimeoutError:  # loading goes on
            problem = Unsupported("the model's tokenizer is still loading", code="no_tokenizer")
        except Unsupported as error:
            problem = error
            self._tokenizer_retry_at += TOKENIZER_RETRY_S
        if problem is not None and str(problem) != str(self.tokenizer_problem):
            log.warning("%s: messages cannot be appended to ids: %s", self.name, problem)
        self.tokenizer_problem = problem

    @property
    def state(self) -> ReplicaState:
        """Whether it can serve requests now, or why not."""
        if self.capabilities is None:
            return ReplicaState.DOWN if self.was_tried else ReplicaState.STARTING
        if self.draining:
            return ReplicaState.DRAINING
        if self.difference:
            return ReplicaState.DIFFERENT
        if self.fleet.weights.problem(self):
            return ReplicaState.STALE
        return ReplicaState.EJECTED if self.breaker.opens_for_s() else ReplicaState.READY

    def report_state(self) -> None:
        """Show the state, and how many conversations have room, in the metrics, if they changed."""
        if (shown := (self.state, self.cache.contexts)) != self._reported:
            self._reported = shown
            self.metrics.replica_state(self.name, *shown)
