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
from tokenproxy.base.errors import ApiError, EngineBroken, EngineUnavailable
from tokenproxy.base.fields import is_null
from tokenproxy.base.http import Response
from tokenproxy.base.request import ResumePolicy
from tokenproxy.base.types import Fields
from tokenproxy.engine.sse import data_event
from tokenproxy.fleet.dispatch import Work
from tokenproxy.record.completion import Completion as Recorded
from tokenproxy.record.recorder import Recording
from tokenproxy.record.vocabulary import ABORTED
from tokenproxy.turn.rest import Rest, can_resume, full_event, is_full, joined, rest_events, usage_event
from tokenproxy.turn.sending import PlannedTurn
from tokenproxy.turn.wire import ABSENT, Completion

log = logging.getLogger("tokenproxy")

_NO_REPLICA_S = 120.0
"""How long a turn waits for a replica that responds: as long as an engine takes to start again."""
_RETRY_S = 0.5
_FRUITLESS_ABORTS = 100
"""How often in a row a turn is resumed and no id comes: updates may follow one another fast."""
_FRUITLESS_FAILURES = 3
"""The same after failures, of which the turn may be the cause."""


class Resume:
    """Resumes one turn as often as its engines break off."""

    def __init__(self, turn: PlannedTurn, recording: Recording, cleanup: AsyncExitStack) -> None:
        """`cleanup` closes the responses of the engines."""
        self._turn = turn
        self._recording = recording
        self._cleanup = cleanup
        self._policy = turn.services.settings.resume
        self._possible = self._policy is not ResumePolicy.OFF and can_resume(turn.request, turn.plan)
        self._sampled = -1
        self._fruitless = 0

    def covers(self, completion: Completion) -> bool:
        """Whether the turn may go on after a chunk or completion with which its engine breaks off."""
        reasons = {choice.finish_reason for choice in completion.choices or ()}
        failed = "error" in reasons or (completion.error is not ABSENT and not is_null(completion.error))
        return self._possible and (failed or (ABORTED in reasons and self._policy is ResumePolicy.ALL))

    def give_up(self) -> None:
        """The turn does not go on, whatever follows."""
        self._possible = False

    async def was_asked(self) -> bool:
        """Whether somebody asked for an abort since the turn was sent the last time, as far as is known."""
        weights = self._turn.services.fleet.weights
        return not await weights.refresh() or weights.state.aborts != self._turn.aborts

    def goes_on(self, rests: Sequence[Rest], why: str) -> bool:
        """Whether the turn goes on after a break; if so, its segment ends.

        Args:
            rests: the choices that did not end.
            why: why the engine broke off, in one word.
        """
        sampled = sum(len(rest.sampled) for rest in rests)
        self._fruitless = self._fruitless + 1 if sampled == self._sampled else 0
        self._sampled = sampled
        most = _FRUITLESS_ABORTS if why == ABORTED else _FRUITLESS_FAILURES
        if not self._possible or self._fruitless >= most or not all(rest.prompt for rest in rests):
            return False
        self._turn.end_segment({rest.choice: len(rest.sampled) for rest in rests}, why)
        return True

    async def events(self, rests: Sequence[Rest], head: Fields, ended: int) -> AsyncIterator[bytes]:
        """The rest of a stream.

        Args:
            head: the fields that its chunks share.
            ended: number of ids of the choices that have ended.

        Raises:
            EngineBroken: this engine broke off too, or the rest does not fit what the client got.
            ApiError: as `Fleet.send`.
        """
        sampled = ended
        for rest in rests:
            if is_full(self._turn.request.fields, len(rest.sampled)):
                sampled += len(rest.sampled)
                yield full_event(head, rest.choice)
                continue
            response = await self._send(partial(self._turn.send_rest, rest))
            self._cleanup.push_async_callback(response.aclose)
            count = len(rest.sampled)
            async for event, new in rest_events(response, rest, head):
                count += new
                yield event
            sampled += count
        yield usage_event(head, ids.check(rests[0].prompt), sampled)
        yield data_event(b"[DONE]")

    async def aborted(self, completion: Recorded) -> list[Rest]:
        """The rests of the choices of a whole completion that an engine aborted, if the turn goes on then."""
        rests = [
            Rest(choice.index, completion.prompt_ids or b"", list(choice.ids or ()), choice.message)
            for choice in completion.choices
            if choice.finish_reason == ABORTED
        ]
        resumes = self._policy is ResumePolicy.ALL and self._fruitless < _FRUITLESS_ABORTS
        return rests if rests and resumes and not await self.was_asked() else []

    async def whole(self, body: bytes, rests: Sequence[Rest]) -> bytes | None:
        """A completion in which the choices that were aborted go on, or one that was sampled anew.

        Returns None if there is none: the turn ends as it was aborted.
        """
        try:
            if self._possible and self.goes_on(rests, ABORTED):
                for rest in rests:
                    more = await self._read(partial(self._turn.send_rest, rest))
                    body = joined(body, rest, more, parsed=self._turn.parses_ids)
                return body
        except EngineBroken as error:
            log.info("a turn is sampled anew: %s", error)
        try:
            self._turn.end_segment({}, ABORTED)
            return await self._read(self._turn.send)
        except ApiError as error:
            log.warning("an aborted turn could not be sampled anew: %s", error)
            return None

    async def _read(self, work: Work) -> bytes:
        response = await self._send(work)
        try:
            return await response.read()
        finally:
            await response.aclose()

    async def _send(self, work: Work) -> Response:
        """The response of a replica that goes on. Waits for one that responds."""
        turn, deadline = self._turn, monotonic() + _NO_REPLICA_S
        while True:
            try:
                response = await turn.services.fleet.send(work, turn.routing())
                break
            except EngineUnavailable:
                if monotonic() > deadline:
                    raise
                await asyncio.sleep(_RETRY_S)
        self._recording.replica = turn.replica.name
        if response.status >= 400:
            await response.aclose()
            raise EngineBroken(f"the turn cannot go on: an engine answered {response.status}")
        return response
