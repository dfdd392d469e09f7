"""What the routes see of this room: plan the prompt of a request, and record what was sampled behind it.

Law, for every plan that extends a turn:

    plan.prompt == ids of that turn, then the ids that the chat template puts behind it
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

import msgspec

from proxy.errors import Unsupported
from proxy.fleet.replica import Replica
from proxy.history.conversation import Asked, Conversation, Digester
from proxy.history.evidence import Outcome
from proxy.history.known import Known, KnownTurns, make_known
from proxy.history.matcher import Match, Matcher
from proxy.history.plan import Plan
from proxy.history.recording import Recorded, recorded
from proxy.history.store import Store, StoreError
from proxy.history.turn import new_id
from proxy.metrics import Metrics
from tokenization import ChatTokenizer, InvalidMessages, TemplateUnsupported, TokenizationError, ids

log = logging.getLogger("tokenproxy")

T = TypeVar("T")

EVICTION_INTERVAL_S = 60.0
TOKENIZER_TIMEOUT_S = 30.0
"""Longer than it takes to load one; a hub that does not answer must not hold every request."""
_SMALL = 16_384
"""Bytes that are read on the event loop: sooner done than handed to a thread."""


class Rollouts:
    """Plans and records. One per application."""

    def __init__(
        self, store: Store, executor: Executor, metrics: Metrics, known_bytes: int = 256 * 2**20
    ) -> None:
        self.store = store
        self.metrics = metrics
        self._executor = executor
        self._digester = Digester()
        self._known = KnownTurns(known_bytes)
        self._matcher = Matcher(store, self._known, executor)
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Open the store, and begin to let go of what is too old."""
        await self.store.open()
        self.spawn(self._evict_now_and_then())

    async def aclose(self) -> None:
        """Record what is under way, then close the store."""
        tasks = list(self._tasks)
        recording = [task for task in tasks if task.get_name() == "record"]
        for task in tasks:
            if task not in recording:
                task.cancel()
        if recording:
            await asyncio.wait(recording, timeout=10)
        await self.store.aclose()

    def spawn(self, work: Coroutine[Any, Any, None], name: str | None = None) -> "asyncio.Task[None]":
        """Do something in a task that is held until it is done."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def plan(self, asked: Asked, replica: Replica) -> Plan:
        """How the prompt of a request comes about. What goes wrong on the way is a reason to render."""
        base = replica.known().model
        model = asked.model or (base.name if base else "")
        tokenizer, refusal = await _tokenizer(replica)
        plan = Plan(asked, None, model, asked.session or new_id(), choices=asked.choices)
        try:
            plan.conversation = await self._read(asked, _identity(tokenizer, model))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TokenizationError):
            plan.reason = "unreadable"
            return self._counted(plan)
        try:
            match = await self._matcher.match(plan.conversation, asked.session)
        except StoreError as error:
            self.complain("the prompt of a request is rendered", error)
            match = Match(None, -1, reason="store_unavailable")
        if match.known is not None:
            plan.rollout = match.known.rollout
        plan.reason = match.reason
        if asked.special == "ids_given":
            plan.source, plan.reason = "given", asked.special
        elif plan.reason != "first_turn":
            plan.reason = self._forbidden(plan, replica) or refusal or match.reason
        if match.known is not None and tokenizer is not None and plan.reason in ("", "history_edited"):
            await self._extend(plan, match, tokenizer)
        return self._counted(plan)

    async def plan_given(
        self, asked: Asked, replica: Replica, prompt: bytes, source: str, *, whole: bool
    ) -> Plan:
        """Where the turn of a request stands whose client sent ids.

        Args:
            asked: `special` is the reason that is said.
            prompt: the prompt as it goes to the engine; empty where the engine renders messages.
            whole: whether `asked.messages` are the conversation; if not, they are what the ids behind the
                turn before were made of.
        """
        base = replica.known().model
        model = asked.model or (base.name if base else "")
        prompt = ids.compact(prompt)
        plan = Plan(asked, None, model, asked.session or new_id(), source, asked.special, prompt)
        plan.choices, plan.whole = asked.choices, whole
        try:
            identity = _identity((await _tokenizer(replica))[0], model)
            plan.conversation = await self._read(asked, identity)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TokenizationError):
            return self._counted(plan)  # the engine refuses them, or never looks at them
        try:
            if prompt:
                await self._find_parent(plan, plan.conversation)
        except StoreError as error:
            self.complain("a turn is recorded without the one before it", error)
        if prompt:
            known = len(plan.parent.raw) if plan.parent else 0
            plan.added = await self._in_thread(lambda: _ids_behind(prompt, known))
        return self._counted(plan)

    async def _find_parent(self, plan: Plan, conversation: Conversation) -> None:
        """The turn whose ids a given prompt begins with."""
        if plan.whole:
            match = await self._matcher.match(conversation, plan.asked.session)
            if match.known is not None and match.known.begins(plan.prompt):
                plan.parent, plan.end, plan.rollout = match.known, match.end, match.known.rollout
        else:
            plan.parent = await self._matcher.longest_prefix(plan.prompt, plan.rollout)

    async def record(self, plan: Plan, outcome: Outcome) -> list[str]:
        """Record the turns of an answer; they are found from now on. Returns their ids.

        A store that does not answer is logged and counted: the client gets its answer all the same.
        """
        if plan.conversation is None or not outcome.choices:
            return []
        read = len(outcome.prompt_ids or b"") + 8 * sum(len(one.ids or ()) for one in outcome.choices)
        try:
            if read < _SMALL:
                made = recorded(plan, outcome)
            else:
                made = await self._in_thread(lambda: recorded(plan, outcome))
        except Exception:  # the boundary: whatever an engine says, the client gets its answer
            self.metrics.store_errors.inc()
            log.exception("a turn of rollout %s could not be recorded", plan.rollout)
            return []
        if not made:
            return []
        try:
            evicted = await self.store.add([one.turn for one in made], [one.keys for one in made])
        except StoreError as error:
            self.complain(f"a turn of rollout {plan.rollout} was not recorded", error)
            return []
        if evicted.rollouts:
            self.metrics.evicted.inc(evicted.rollouts)
            log.info("the store is full: %d rollouts made room (%d turns)", evicted.rollouts, evicted.turns)
        for one in made:
            self._remember(plan, one)
        return [one.turn.id for one in made]

    async def surely(self, *work: Coroutine[Any, Any, object]) -> None:
        """Do something to its end, even if whoever waits for it is cancelled meanwhile."""

        async def all_of_it() -> None:
            await asyncio.gather(*work)

        await asyncio.shield(self.spawn(all_of_it(), "record"))

    def record_later(self, plan: Plan, outcome: Outcome) -> None:
        """Record a turn that was broken off: its request is being cancelled and cannot wait."""

        async def work() -> None:
            await self.record(plan, outcome)

        self.spawn(work(), "record")

    def complain(self, what: str, error: StoreError) -> None:
        """Say that something was not done because the store does not answer."""
        self.metrics.store_errors.inc()
        log.error("%s: %s", what, error)

    def forget(self, rollout: str) -> None:
        """Let go of the turns of a deleted rollout that are at hand."""
        self._known.drop(rollout)

    def _remember(self, plan: Plan, one: Recorded) -> None:
        self.metrics.turns.labels(one.turn.finish_reason or "unknown", one.turn.problem or "none").inc()
        if one.prompt:
            parent = plan.parent if one.turn.parent else None
            self._known.put(make_known(one.turn, parent, one.prompt, one.completion))

    async def _read(self, asked: Asked, identity: str) -> Conversation:
        if len(asked.messages) < _SMALL:
            return self._digester.read(asked, identity)
        return await self._in_thread(lambda: self._digester.read(asked, identity))

    def _forbidden(self, plan: Plan, replica: Replica) -> str:
        """Why the engine must render this request, whatever was recorded."""
        assert plan.conversation is not None
        if plan.asked.special:
            return plan.asked.special
        if plan.conversation.media:
            return "media"
        return "no_token_in" if replica.known().token_in is None else ""

    async def _extend(self, plan: Plan, match: Match, tokenizer: ChatTokenizer) -> None:
        """Put behind the recorded ids what the template puts there."""
        known, conversation = match.known, plan.conversation
        assert known is not None and conversation is not None
        if not known.usable:
            plan.reason = "unusable_turn"
            return
        if conversation.ends_with_assistant:
            plan.reason = "ends_with_assistant"
            return
        try:
            prompt, added = await self._in_thread(
                lambda: _extended(known, conversation, match.end, tokenizer)
            )
        except TemplateUnsupported:
            plan.reason = "template_unsupported"
        except InvalidMessages:
            plan.reason = "template_refused"
        else:
            plan.source, plan.prompt, plan.added = "extended", prompt, added
            plan.parent, plan.end, plan.candidates = known, match.end, match.candidates

    def _counted(self, plan: Plan) -> Plan:
        self.metrics.prompts.labels(plan.source, plan.reason or "none").inc()
        if plan.candidates > 1:
            self.metrics.ambiguous.inc()
        return plan

    async def _evict_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(EVICTION_INTERVAL_S)
            try:
                evicted = await self.store.evict()
            except StoreError as error:
                self.complain("nothing could be evicted", error)
                continue
            if evicted.rollouts:
                self.metrics.evicted.inc(evicted.rollouts)
                log.info("%d rollouts (%d turns) were evicted: too old", evicted.rollouts, evicted.turns)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


async def _tokenizer(replica: Replica) -> tuple[ChatTokenizer | None, str]:
    """The tokenizer of an engine, or the reason why there is none."""
    try:
        async with asyncio.timeout(TOKENIZER_TIMEOUT_S):
            return await replica.tokenizer(), ""
    except TimeoutError:
        return None, "no_tokenizer"
    except Unsupported as error:
        return None, error.code or "no_tokenizer"


def _identity(tokenizer: ChatTokenizer | None, model: str) -> str:
    """What ids mean something to: two models of one name may have different tokenizers."""
    return f"{tokenizer.fingerprint if tokenizer else ''}/{model}"


def _ids_behind(prompt: bytes, known: int) -> list[int]:
    """The ids of a JSON array behind those of an array of `known` bytes that it begins with; all for 0."""
    if not known:
        return msgspec.json.decode(prompt, type=list[int])
    tail = prompt[known - 1 :]  # `,7,8]`, or `]` alone
    return msgspec.json.decode(b"[" + tail.removeprefix(b","), type=list[int])


def _extended(
    known: Known, conversation: Conversation, end: int, tokenizer: ChatTokenizer
) -> tuple[bytes, list[int]]:
    """The next prompt as a JSON array, and the ids behind the recorded ones.

    The history is looked at only where the new messages alone do not decide what follows.
    """
    new = conversation.parse(end + 1, len(conversation.raws))
    setting = conversation.setting
    last = ids.last(known.raw)
    options: dict[str, Any] = {
        **setting.read_template_kwargs(),
        "tools": setting.read_tools(),
        "finish_reason": known.finish_reason,
        # a stop token that only this request named ends no turn in the template's eyes
        "stop_reason": known.stop_reason if isinstance(known.stop_reason, str) else None,
        "add_generation_prompt": setting.add_generation_prompt,
    }
    try:
        following = tokenizer.continuation(last, new, **options)
    except TokenizationError:
        history = conversation.parse(0, end + 1)
        following = tokenizer.continuation(last, new, history=history, **options)
    added = [*following.close_ids, *following.suffix_ids]
    return ids.join(known.raw, added), added
