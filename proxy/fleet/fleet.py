"""All engines of the proxy, used round-robin."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from proxy.engine.discovery import NO_TOKEN_IN
from proxy.errors import EngineBroken, EngineTimeout, EngineUnavailable, Unsupported
from proxy.fleet.replica import Replica
from proxy.http import Request, Response

T = TypeVar("T")

FIRST_ANSWER_TIMEOUT_S = 30.0


class Fleet:
    """Replicas of one model. Each request goes to the next replica that is ready."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = list(replicas)
        self._next = 0

    def start(self) -> None:
        """Start watching all replicas."""
        for replica in self.replicas:
            replica.start()

    async def stop(self) -> None:
        """Stop watching and close all connections."""
        for replica in self.replicas:
            await replica.stop()

    async def wait_discovered(self, timeout_s: float = FIRST_ANSWER_TIMEOUT_S) -> None:
        """Wait until one replica is ready, discovery was tried on all, or `timeout_s` seconds passed."""
        waits = [asyncio.create_task(replica.wait_discovered()) for replica in self.replicas]
        try:
            async with asyncio.timeout(timeout_s):
                for done in asyncio.as_completed(waits):
                    await done
                    if any(replica.ready for replica in self.replicas):
                        return
        except TimeoutError:
            return
        finally:
            for task in waits:
                task.cancel()

    async def send(self, request: Request) -> Response:
        """Send a request to the next ready replica. Raises as `on_replica` and `Engine.send`."""
        return await self.on_replica(lambda replica: replica.engine.send(request))

    async def send_to_any(self, request: Request) -> Response:
        """Send a request to a ready replica; if none is, to one that refuses discovery without a credential.

        Raises: as `send`.
        """
        need_credential = [replica for replica in self.replicas if replica.wants_credential]
        if need_credential and not any(replica.ready for replica in self.replicas):
            return await need_credential[0].engine.send(request)
        return await self.send(request)

    async def lend_credential(self, credential: tuple[bytes, bytes]) -> None:
        """Repeat discovery with a client's accepted credential on the replicas that refuse it without one."""
        for replica in self.replicas:
            await replica.lend_credential(credential)

    async def on_replica(self, work: Callable[[Replica], Awaitable[T]], *, token_in: bool = False) -> T:
        """Run `work` on the next ready replica; if that accepts no connection, on the one after it.

        Args:
            token_in: whether the replica must accept exact prompts.

        Raises:
            EngineUnavailable: no replica responds.
            EngineTimeout: no replica accepted a connection in time.
            EngineBroken: a replica broke after it got the request.
            Unsupported: replicas respond, but none accepts exact prompts.
        """
        ready = [replica for replica in self.replicas if replica.ready]
        if not ready:
            await self.wait_discovered()
            ready = [replica for replica in self.replicas if replica.ready]
        if token_in:
            capable = [r for r in ready if r.capabilities is not None and r.capabilities.token_in is not None]
            if ready and not capable:
                raise Unsupported(NO_TOKEN_IN, param="prompt_ids", code="no_token_in")
            ready = capable
        self._next += 1
        timeout: EngineTimeout | None = None
        for offset in range(len(ready)):
            replica = ready[(self._next + offset) % len(ready)]
            try:
                return await work(replica)
            except EngineUnavailable as error:
                replica.mark_down(error)
            except EngineTimeout as error:
                timeout = error
                replica.check_now()
            except EngineBroken:
                # the replica may have run the request: another one must not run it again
                replica.check_now()
                raise
        if timeout is not None:
            raise timeout
        problems = "; ".join(str(report.get("problem", "")) for report in self.report())
        raise EngineUnavailable(f"no engine responds: {problems}")

    def report(self) -> list[dict[str, Any]]:
        """The state of every replica, as `GET /ready` returns it."""
        return [replica.report() for replica in self.replicas]
