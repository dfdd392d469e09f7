"""Goes on with a turn whose engine broke off: one answer for the client, one turn in the record.

An engine breaks off if it dies, if its connection breaks, or if it aborts a request because its weights
change. The turn then goes on, on this or another replica, from the ids that were sampled so far: see `rest`.
An abort that somebody asked for stays one.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from time import monotonic

from chat_tokenizer import ids
from tokenproxy.base.errors import ApiError, CannotGoOn, EngineBroken, EngineUnavailable
from tokenproxy.base.http import Response, read_and_close
from tokenproxy.base.request import ResumePolicy
from tokenproxy.base.types import Fields
from tokenproxy.engine.protocol import problem_of
from tokenproxy.engine.sse import DONE, data_event
from tokenproxy.fleet.dispatch import Work
from tokenproxy.fleet.replica import Replica
from tokenproxy.record.completion import Completion as Recorded
from tokenproxy.record.recorder import Recording
from tokenproxy.record.store_time import renew_store_time
from tokenproxy.record.vocabulary import ABORTED
from tokenproxy.turn.answer import Answer
from tokenproxy.turn.rest import Rest, end_event, is_full, joined, rest_events, usage_event
from tokenproxy.turn.sending import PlannedTurn
from tokenproxy.turn.wire import Completion, is_set

log = logging.getLogger("tokenproxy")

_NO_REPLICA_S = 120.0
"""How long a turn waits for a replica that responds: as long as an engine takes to start again."""
_RETRY_S = 0.5
_READS = 20
"""How often the state of the fleet is read from a store that does not respond."""
_FRUITLESS_ABORTS = 100
"""How often in a row a turn is resumed and no id comes: updates may follow one another fast."""
_FRUITLESS_FAILURES = 3
"""The same after failures, of which the turn may be the cause."""
_TIMES_ANEW = 5
"""How often a turn is sampled anew that cannot go on: updates may follow one another faster than it ends."""
_TOO_MANY_REQUESTS = 429


class _AbortAsked(CannotGoOn):
    """Somebody asked for an abort while the turn waited for a replica."""


class Resume:
    """Resumes one turn as often as its engines break off."""

    def __init__(
        self, turn: PlannedTurn, recording: Recording, answer: Answer, cleanup: AsyncExitStack
    ) -> None:
        """`cleanup` closes the responses of engines if the client leaves."""
        self._turn = turn
        self._weights = turn.services.fleet.weights
        self._recording = recording
        self._answer = answer
        self._cleanup = cleanup
        self._aborts_too = turn.services.settings.resume is ResumePolicy.ALL
        self._possible = turn.resumable
        self._sampled = -1
        self._fruitless = {ABORTED: 0, "": 0}
        """How often in a row no id came: after aborts, and after failures."""
        self._times_anew = 0
        self._broken_off: tuple[str, str] | None = None
        """The engine that broke off, and why, until it is counted what became of the turn."""

    def covers(self, completion: Completion, *, complete: bool) -> bool:
        """Whether the turn may go on after a chunk with which its engine breaks off.

        Args:
            complete: whether all choices have ended. vLLM sends no finish reason of a request that it aborts
                before it sampled, only the usage of the stream.
        """
        reasons = {choice.finish_reason for choice in completion.choices or ()}
        failed = "error" in reasons or is_set(completion.error)
        silent = not (completion.choices or complete) and is_set(completion.usage)
        return self._possible and (failed or ((ABORTED in reasons or silent) and self._aborts_too))

    def give_up(self) -> None:
        """The turn does not go on, whatever follows."""
        self._possible = False
        self._count("ended")

    async def end_segment(self, rests: Sequence[Rest], why: str) -> bool:
        """Whether the turn goes on after a break; its segment has ended then.

        Args:
            rests: the choices that did not end; none if only the end of a stream is missing.
            why: why the engine broke off, in one word; `abort` only where the turn may go on after that.
        """
        if not rests:
            return self._possible
        may = self._possible and all(rest.prompt for rest in rests) and await self._may_repeat(rests, why)
        if may:
            sampled = {rest.choice: len(rest.sampled) for rest in rests}
            await self._turn.segments.end(self._weights, self._turn.tag, sampled, why)
        self._broken_off = self._turn.replica.name, why
        return may

    async def events(
        self, rests: Sequence[Rest], head: Fields, prompt: bytes, ended: int, *, told: bool
    ) -> AsyncIterator[bytes]:
        """The rest of a stream.

        Args:
            head: the fields that its chunks share.
            prompt: as a JSON array of ids.
            ended: number of ids of the choices that have ended.
            told: whether the usage of the whole stream came.

        Raises:
            EngineBroken: this engine broke off too.
            CannotGoOn: the rest does not fit what the client got.
            ApiError: as `Fleet.send`.
        """
        sampled, model = ended, self._turn.model.capabilities.model
        try:
            for rest in rests:
                count = len(rest.sampled)
                if is_full(self._turn.request.fields, rest, model.max_model_len if model else None):
                    self._count("resumed")
                    yield end_event(head, rest.choice, "length")
                else:
                    try:
                        response = await self._send(partial(self._turn.send_rest, rest))
                    except _AbortAsked:
                        self.give_up()
                        yield end_event(head, rest.choice, ABORTED)
                        continue
                    self._count("resumed")
                    self._cleanup.push_async_callback(response.aclose)
                    try:
                        more = rest_events(response, rest, head, parsed=self._turn.parses_ids)
                        async for event, new in more:
                            count += new
                            yield event
                    finally:
                        await response.aclose()  # it counts as running until then
                sampled += count
        finally:
            self._count("ended")  # unless something went on: the client may have left before that
        if not told:
            yield usage_event(head, ids.check(prompt), sampled)
        yield data_event(DONE)

    async def whole(self, body: bytes, completion: Recorded) -> bytes | None:
        """A completion in which the choices that were aborted go on, or one that was sampled anew.

        Returns None if there is none: the turn ends as it was aborted.
        """
        aborted = [choice for choice in completion.choices if choice.finish_reason == ABORTED]
        rests = [
            Rest(
                choice.index,
                b"" if choice.ids is None else completion.prompt_ids or b"",
                list(choice.ids or ()),
                choice.message,
            )
            for choice in aborted
        ]
        if not rests or not self._aborts_too:
            return None
        try:
            if await self.end_segment(rests, ABORTED):
                for rest in rests:
                    more = await self._read(partial(self._turn.send_rest, rest))
                    body = joined(body, rest, more, parsed=self._turn.parses_ids)
                self._count("resumed")
                return body
            # what has ended by itself is not dropped for the sake of another choice
            if len(aborted) == len(completion.choices) and await self._may_repeat((), ABORTED):
                return await self._anew()
        except _AbortAsked:
            return None
        except (EngineBroken, CannotGoOn) as error:
            log.info("a turn is sampled anew: %s", error)
            return await self._anew()
        except ApiError as error:
            log.warning("an aborted turn could not go on: %s", error)
        finally:
            self._count("ended")
        return None

    def _count(self, result: str) -> None:
        """Count what became of the turn after its engine broke off, unless that was counted before."""
        if self._broken_off is None:
            return
        (engine, why), self._broken_off = self._broken_off, None
        self._turn.services.history.metrics.breaks(why, result).inc()
        level = logging.DEBUG if result == "resumed" else logging.INFO
        log.log(level, "%s broke a turn off (%s): %s", engine, why, result)

    async def _anew(self) -> bytes | None:
        if self._times_anew == _TIMES_ANEW:
            return None
        self._times_anew += 1
        self._count("anew")
        await self._turn.segments.end(self._weights, self._turn.tag, None, ABORTED)
        try:
            return await self._read(self._turn.send)
        except ApiError as error:
            log.warning("an aborted turn could not be sampled anew: %s", error)
            return None

    async def _may_repeat(self, rests: Sequence[Rest], why: str) -> bool:
        """Whether something came since the last break, or it may be tried again without that."""
        sampled = sum(len(rest.sampled) for rest in rests)
        kind = ABORTED if why == ABORTED else ""
        if sampled == self._sampled:
            self._fruitless[kind] += 1
        else:
            self._fruitless = dict.fromkeys(self._fruitless, 0)
        self._sampled = sampled
        if why == ABORTED and await self._was_asked():
            return False
        if self._fruitless[kind]:
            await asyncio.sleep(_RETRY_S)
        return self._fruitless[kind] < (_FRUITLESS_ABORTS if kind else _FRUITLESS_FAILURES)

    async def _was_asked(self) -> bool:
        """Whether somebody asked for an abort since the turn was sent the last time, or nothing tells."""
        for _ in range(_READS):
            renew_store_time()  # a turn may run for minutes: each read may wait as long as a new request
            if await self._weights.refresh():
                return self._weights.state.aborts != self._turn.aborts
            await asyncio.sleep(_RETRY_S)
        return True

    async def _read(self, work: Work) -> bytes:
        return await read_and_close(await self._send(work))

    async def _unless_asked(self, work: Work, replica: Replica) -> Response:
        """Send it, unless somebody asked for an abort while it waited. Raises _AbortAsked then."""
        if self._weights.state.aborts != self._turn.aborts:
            raise _AbortAsked("an abort was asked for")
        return await work(replica)

    async def _send(self, work: Work) -> Response:
        """The response of a replica that goes on. Waits for one that responds and is not full."""
        turn, deadline = self._turn, monotonic() + _NO_REPLICA_S
        while True:
            try:
                response = await turn.services.fleet.send(partial(self._unless_asked, work), turn.routing())
                if response.status != _TOO_MANY_REQUESTS or monotonic() > deadline:
                    break
                await response.aclose()
                await asyncio.sleep(_RETRY_S)
            except EngineUnavailable:
                if monotonic() > deadline:
                    raise
                await asyncio.sleep(_RETRY_S)
        self._recording.replica = turn.replica.name
        if response.status >= 400:
            problem = problem_of(await read_and_close(response)).message
            raise CannotGoOn(f"the turn cannot go on: an engine answered {response.status}: {problem}")
        return response
