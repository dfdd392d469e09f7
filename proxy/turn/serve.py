"""Serves one chat turn, whatever wire format it arrived in.

1. A retry gets the response of the request it repeats.
2. A replica is chosen; the prompt is planned for it; the engine completes it. After a failure another replica
   is chosen, and the same request is planned anew.
3. What was sampled is recorded before the client gets the end of its response.
"""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass

from proxy.engine.token_in import CHAT_PATH, TokenRequest
from proxy.errors import Unsupported
from proxy.fields import join
from proxy.fleet.replica import Replica
from proxy.history.completion import Completion
from proxy.history.plan import PromptPlan, ServedModel, prompt_of
from proxy.history.recorder import Recording
from proxy.history.retries import Attempt, EarlierResponse
from proxy.history.vocabulary import Reason
from proxy.http import BytesResponse, Request, Response, is_event_stream
from proxy.metrics import Metrics
from proxy.turn.engine_request import request_for_engine
from proxy.turn.prompt_headers import add_prompt_headers
from proxy.turn.reader import read_completion
from proxy.turn.redactor import redact_completion
from proxy.turn.request import ChatRequest
from proxy.turn.required_prefix import FIELD as PREFIX_FIELD
from proxy.turn.required_prefix import PrefixRefused, render_with_prefix
from proxy.turn.services import Services
from proxy.turn.stream import RecordedStream

TOKENIZER_TIMEOUT_S = 30.0
"""Longer than loading a tokenizer takes; a hub that does not respond must not hold every request."""
_LARGE = 65_536
"""Bytes of a body that is read on a thread."""


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A planned prompt and the head of the engine's response to it."""

    plan: PromptPlan
    response: Response


class _ClosedOnError:
    """Closes an engine's response that nobody gets, because the client left or the store failed.

    Between its head and its owner are steps that wait; one that is cancelled must not leave the engine
    generating for nobody.
    """

    def __init__(self) -> None:
        self.response: Response | None = None

    async def __aenter__(self) -> "_ClosedOnError":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None and self.response is not None:
            await self.response.aclose()


async def serve_turn(request: ChatRequest, services: Services) -> Response:
    """The response to a chat request: a chat completion, its stream of chunks, or an engine's error.

    Raises:
        ApiError: there is none; see `proxy.errors`.
    """
    history = services.history
    async with AsyncExitStack() as stack:
        opened = await stack.enter_async_context(_ClosedOnError())
        attempt = await stack.enter_async_context(history.retries.attempt(request))
        if attempt.earlier is not None:
            return _replayed(attempt.earlier)

        async def exchange(replica: Replica) -> _Exchange:
            plan = await _plan(request, replica, services)
            # from here to the end of the response: nobody evicts the rollout under a turn that runs
            stack.enter_context(history.pins.hold(plan.placement.session.id))
            async with history.planner.released_on_error(plan):
                opened.response = await _send(request, plan, replica, services)
                return _Exchange(plan, opened.response)

        try:
            exchanged = await services.fleet.on_replica(exchange, token_in=request.needs_token_in)
        except PrefixRefused as refused:
            await attempt.fail(refused.response.status)
            return refused.response
        plan, response = exchanged.plan, exchanged.response
        recording = history.recorder.start(plan)
        stack.push_async_callback(_release_unless_recorded, recording, services)
        _count(plan, history.metrics)
        add_prompt_headers(response, plan)
        if response.status >= 400:
            await attempt.fail(response.status)
            return response
        if plan.placement.conversation is None and not attempt.wants_body:
            return response
        if is_event_stream(response.headers):
            await recording.announce()
            return RecordedStream(response, request, recording, attempt.hand_over(), stack.pop_all())
        return await _record_whole(response, request, recording, attempt, services)


async def _plan(request: ChatRequest, replica: Replica, services: Services) -> PromptPlan:
    """Plan the prompt for one replica."""
    planner, model = services.history.planner, await served_model(replica, request)
    if request.required_prefix is None:
        return await planner.plan(request, model)
    rendered = await render_with_prefix(request, replica, services)
    return await planner.plan_prefix(request, rendered.prompt, rendered.prefix, model)


async def _send(request: ChatRequest, plan: PromptPlan, replica: Replica, services: Services) -> Response:
    recorded = plan.placement.conversation is not None
    fields = request_for_engine(request, evidence=recorded, logprobs=services.record_logprobs)
    # the response is read here, so it must not be compressed
    headers = [pair for pair in request.headers if pair[0] != b"accept-encoding"]
    if prompt := prompt_of(plan):
        name = request.given.field if request.given else "messages"
        if request.required_prefix is not None:
            name = PREFIX_FIELD
        token_in = replica.known().require_token_in()
        return await token_in.complete(replica.engine, TokenRequest(prompt, fields, headers, name))
    call = Request("POST", CHAT_PATH, headers, join(fields), repeatable=True)
    return await replica.engine.send(call)


async def served_model(replica: Replica, request: ChatRequest) -> ServedModel:
    """What planning needs to know of a replica.

    Raises:
        EngineUnavailable: the replica went away.
    """
    known = replica.known()
    tokenizer, problem = None, None
    try:
        async with asyncio.timeout(TOKENIZER_TIMEOUT_S):
            tokenizer = await replica.tokenizer()
    except TimeoutError:
        problem = Unsupported("the model's tokenizer is still loading", code=Reason.NO_TOKENIZER)
    except Unsupported as error:
        problem = error
    refused = None
    if known.token_in is None:
        refused = Reason.NO_TOKEN_IN
    elif not known.token_in.takes(request.fields):
        refused = Reason.SPECIAL_REQUEST
    name = known.model.name if known.model else ""
    return ServedModel(name, tokenizer, problem, refused, known.printed, known.logprobs_mode)


async def _record_whole(
    response: Response, request: ChatRequest, recording: Recording, attempt: Attempt, services: Services
) -> Response:
    """A whole completion, recorded, with what the client asked to see of it."""
    try:
        body = await response.read()
    finally:
        await response.aclose()

    sent = prompt_of(recording.plan)

    def read() -> tuple[Completion, bytes]:
        return read_completion(body, sent), redact_completion(body, request.visible)

    completion, visible = read() if len(body) < _LARGE else await services.in_thread(read)
    await recording.add(completion)
    await attempt.keep(response.status, response.headers, visible)
    return BytesResponse(response.status, response.headers, visible)


def _replayed(earlier: EarlierResponse) -> Response:
    headers = [*earlier.headers, (b"x-request-replayed", b"true")]
    return BytesResponse(earlier.status, headers, earlier.body)


def _count(plan: PromptPlan, metrics: Metrics) -> None:
    """Count a prompt, once for each request."""
    metrics.prompts.labels(plan.source, plan.reason or "none").inc()
    if plan.reason == Reason.AMBIGUOUS:
        metrics.ambiguous.inc()


async def _release_unless_recorded(recording: Recording, services: Services) -> None:
    if not recording.recorded:
        await services.history.planner.release(recording.plan)
