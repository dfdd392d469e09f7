"""Serves one chat turn of any wire format; a completions request with several prompts is a turn for each.

1. A retry gets the response of the request it repeats.
2. The prompt is planned, then a replica is chosen that completes it. After a failure another replica gets it.
3. What was sampled is recorded before the client gets the end of its response.
"""

from contextlib import AsyncExitStack
from functools import partial

from proxy.errors import EngineBroken
from proxy.fleet.weight_tags import unknown
from proxy.history.completion import Completion
from proxy.history.plan import PromptPlan, prompt_of
from proxy.history.recorder import Recording
from proxy.history.retries import Attempt, EarlierResponse
from proxy.http import BytesResponse, Response, is_event_stream
from proxy.turn.large_body import read_large
from proxy.turn.message_ids import add_message_ids
from proxy.turn.observed import count_plan
from proxy.turn.prompt_headers import add_prompt_headers
from proxy.turn.reader import read_completion
from proxy.turn.redactor import redact_completion
from proxy.turn.request import ChatRequest, EngineRoute
from proxy.turn.required_prefix import PrefixRefused
from proxy.turn.sending import batch_of, plan_turn
from proxy.turn.services import Services
from proxy.turn.stream import RecordedStream

_READ_ON_THREAD_BYTES = 65_536
"""Bytes of a completion from which it is read on a thread. Reading takes 0.3 ms for so many bytes, as long
as handing them to a thread; the work of `WORTH_A_THREAD_BYTES` takes longer per byte."""


class _ClosedOnError:
    """Closes an engine's response that is not delivered, because the client left or the store failed.

    Several steps wait between the arrival of its head and its delivery; if one of them is cancelled, the
    engine must stop generating.
    """

    def __init__(self) -> None:
        self.response: Response | None = None

    async def __aenter__(self) -> "_ClosedOnError":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None and self.response is not None:
            await self.response.aclose()


async def serve_turn(request: ChatRequest, services: Services) -> Response:
    """The response to a request: a completion, its stream of chunks, or an engine's error.

    Raises:
        ApiError: the turn cannot be served; see `proxy.errors`.
    """
    history = services.history
    async with AsyncExitStack() as stack:
        opened = await stack.enter_async_context(_ClosedOnError())
        attempt = await stack.enter_async_context(history.retries.attempt(request))
        if attempt.earlier is not None:
            return _replayed(attempt.earlier)
        claims = await stack.enter_async_context(history.claims())

        try:
            request = await history.echoes.resolve(request)
            turn = await plan_turn(request, services, claims)
            recording = history.recorder.start(turn.plan, claims, turn.add_weights)
            response = opened.response = await services.fleet.send(turn.send, turn.routing())
        except PrefixRefused as refused:
            await attempt.fail(refused.response.status)
            return refused.response
        plan = turn.plan
        turn.tag.progress = unknown  # until the stream is read
        recording.replica = turn.replica.name
        count_plan(plan, history.metrics)
        add_prompt_headers(response, plan)
        if response.status >= 400:
            await attempt.fail(response.status)
            return response
        if plan.placement.conversation is None and not (attempt.wants_body or request.visible.on_messages):
            return response
        if is_event_stream(response.headers):
            await recording.announce()
            return RecordedStream(
                response, request, recording, attempt.hand_over(), stack.pop_all(), turn.tag
            )
        return await _record_whole(response, request, recording, attempt, services)


async def _record_whole(
    response: Response, request: ChatRequest, recording: Recording, attempt: Attempt, services: Services
) -> Response:
    """Record a whole completion; returns it with the fields that the client requested."""
    try:
        body = await response.read()
    finally:
        await response.aclose()

    read = partial(_read_body, body, request, recording.plan)
    completion, visible = read() if len(body) < _READ_ON_THREAD_BYTES else await services.in_thread(read)
    await recording.add(completion)
    if completion.broken_off:
        await attempt.fail(EngineBroken.status)  # a retry gets the whole answer
    else:
        await attempt.keep(response.status, response.headers, visible)
    return BytesResponse(response.status, response.headers, visible)


def _read_body(body: bytes, request: ChatRequest, plan: PromptPlan) -> tuple[Completion, bytes]:
    """What is recorded of a completion, and its JSON with the fields that the client requested."""
    sent, visible, route = prompt_of(plan), request.visible, request.engine_route
    large = read_large(body, sent, visible) if route is EngineRoute.CHAT else None
    if large is not None:
        completion, shown = large
    else:
        completion = read_completion(body, sent, batch_of(request, plan))
        shown = redact_completion(body, visible, route)
    if visible.on_messages and route is EngineRoute.CHAT:
        shown = add_message_ids(shown, completion)
    return completion, shown


def _replayed(earlier: EarlierResponse) -> Response:
    headers = [*earlier.headers, (b"x-request-replayed", b"true")]
    return BytesResponse(earlier.status, headers, earlier.body)
