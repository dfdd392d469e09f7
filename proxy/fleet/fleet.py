"""All engines behind one address, taken in turn."""

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
        """Begin to watch all replicas."""
        for replica in self.replicas:
            replica.start()

    async def stop(self) -> None:
        """Stop watching and close all connections."""
        for replica in self.replicas:
            await replica.stop()

    async def wait_asked(self, timeout_s: float = FIRST_ANSWER_TIMEOUT_S) -> None:
        """Wait until one replica is ready or all were asked; give up after `timeout_s`."""
        asked = [asyncio.create_task(replica.asked()) for replica in self.replicas]
        try:
            async with asyncio.timeout(timeout_s):
                for done in asyncio.as_completed(asked):
                    await done
                    if any(replica.ready for replica in self.replicas):
                        return
        except TimeoutError:
            return
        finally:
            for task in asked:
                task.cancel()

    async def send(self, request: Request) -> Response:
        """Send a request to the next replica. Raises as `on_replica` and `Engine.send`."""
        return await self.on_replica(lambda replica: replica.engine.send(request))

    async def send_to_any(self, request: Request) -> Response:
        """Send a request to a replica that is ready, or else to any that responds: it may want a credential.

        Raises: as `send`.
        """
        waiting = [replica for replica in self.replicas if replica.wants_credential]
        if waiting and not any(replica.ready for replica in self.replicas):
            return await waiting[0].engine.send(request)
        return await self.send(request)

    async def lend_credential(self, credential: tuple[bytes, bytes]) -> None:
        """Let replicas that tell nothing without a credential be asked with one that an engine accepts."""
        for replica in self.replicas:
            await replica.lend_credential(credential)

    async def on_replica(self, work: Callable[[Replica], Awaitable[T]], *, token_in: bool = False) -> T:
        """Do `work` on the next replica; one that accepts no connection is passed over.

        Args:
            token_in: whether the replica must take exact prompts.

        Raises:
            EngineUnavailable: no replica answers.
            EngineTimeout: no replica accepted a connection in time.
            EngineBroken: a replica broke after it got the request.
            Unsupported: replicas answer, but none takes exact prompts.
        """
        ready = [replica for replica in self.replicas if replica.ready]
        if not ready:
            await self.wait_asked()
            ready = [replica for replica in self.replicas if replica.ready]
        if token_in:
            able = [r for r in ready if r.capabilities is not None and r.capabilities.token_in is not None]
            if ready and not able:
                raise Unsupported(NO_TOKEN_IN, param="prompt_ids", code="no_token_in")
            ready = able
        self._next += 1
        slow: EngineTimeout | None = None
        for turn in range(len(ready)):
            replica = ready[(self._next + turn) % len(ready)]
            try:
                return await work(replica)
            except EngineUnavailable as error:
                replica.mark_down(error)
            except EngineTimeout as error:
                slow = error
                replica.suspect()
            except EngineBroken:
                replica.suspect()
                raise
        if slow is not None:
            raise slow
        problems = "; ".join(str(report.get("problem", "")) for report in self.report())
        raise EngineUnavailable(f"no engine answers: {problems}")

    def report(self) -> list[dict[str, Any]]:
        """The state of every replica, for `GET /ready`."""
        return [replica.report() for replica in self.replicas]
