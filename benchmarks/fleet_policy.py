"""The proxy's own policy, as the simulation calls it."""

from collections.abc import Callable

from benchmarks.fleet_choosers import CHOOSERS, Chooser, Request, Response
from proxy.fleet.choosing import Candidate, Policy, Preference, make_choice
from proxy.fleet.conversations import Conversations
from proxy.fleet.fleet import OVERLOAD_RATIO
from proxy.fleet.pace import Crowding, ExpectedLength, Pace, work_of


class StickyLeastLoaded(Chooser):
    """`sticky_least_loaded` made of the proxy's classes, in virtual time."""

    def __init__(self, replicas: int, overload_ratio: float = OVERLOAD_RATIO) -> None:
        super().__init__(replicas)
        self._now = 0.0
        self._choose = make_choice(Policy.STICKY_LEAST_LOADED, overload_ratio)
        self._conversations = Conversations(clock=self._clock)
        self._paces = [Pace(clock=self._clock) for _ in range(replicas)]
        self._crowding = Crowding()
        self._expected_length = ExpectedLength()
        self._sent: dict[int, tuple[float, int]] = {}
        """Of each running turn the load of its replica and the ids that it reads there."""

    def _clock(self) -> float:
        return self._now

    def _pick(self, request: Request, now: float) -> int:
        self._now = now
        key = str(request.conversation)
        holder, reused = self._conversations.holder(key), request.prompt_ids - request.appended_ids
        candidates = [
            Candidate(
                str(replica),
                self.in_flight[replica],
                self._conversations.load(str(replica), key),
                pace.seconds(self._crowding),
                pace.age_s,
            )
            for replica, pace in enumerate(self._paces)
        ]
        preference = Preference(
            holder, request.prompt_ids, reused, self._expected_length.ids, self._crowding.for_choice
        )
        chosen = self._choose(candidates, preference)
        to_read = request.prompt_ids - (reused if chosen.name == holder else 0)
        self._sent[request.conversation] = chosen.conversations, to_read
        self._conversations.begin(key, chosen.name, request.prompt_ids)
        return int(chosen.name)

    def finished(self, response: Response, now: float) -> None:
        """Measure the replica."""
        super().finished(response, now)
        self._now = now
        conversation = response.request.conversation
        load, to_read = self._sent.pop(conversation)
        work = work_of(response.completion_ids, to_read)
        self._paces[response.replica].measure(response.seconds, work, load, self._crowding)
        self._expected_length.measure(response.completion_ids)
        self._conversations.finish(str(conversation))

    def ended(self, conversation: int) -> None:
        """The conversation no longer counts."""
        self._conversations.end(str(conversation))


POLICIES: dict[str, Callable[[int], Chooser]] = {
    "tokenproxy sticky_least_loaded": StickyLeastLoaded,
    **CHOOSERS,
}
"""All policies that the simulation compares."""
