"""Serves one chat turn of any wire format; a completions request with several prompts is a turn for each.

1. A retry gets the response of the request it repeats; a session that reached a limit gets a final answer.
2. The prompt is planned, then a replica is chosen that completes it. After a failure another replica gets it.
3. What was sampled is recorded before the client gets the end of its response.
"""

from contextlib import AsyncExitStack
from functools import partial

from tokenproxy.base.errors import ApiError, EngineBroken, Forbidden
from tokenproxy.base.fields import raw_value
from tokenproxy.base.http import BytesResponse, Response
from tokenproxy.base.request import ChatRequest
from tokenproxy.engine.token_in import GenerateTokenIn
from tokenproxy.fleet.model import FleetImages, FleetModel
from tokenproxy.fleet.weight_state import unknown
from tokenproxy.monitoring.exchange import span
from tokenproxy.record.claims import Claims
from tokenproxy.record.completion import Completion
from tokenproxy.record.given import GivenPrompt
from tokenproxy.record.plan import PromptPlan, ServedModel
from tokenproxy.record.recorder import Recording
from tokenproxy.record.retries import Attempt
from tokenproxy.record.vocabulary import BROKEN_OFF, Reason
from tokenproxy.turn import parsing, wire
from tokenproxy.turn.answer import Answer, Redactor, StreamedAnswer, limit_answer
from tokenproxy.turn.reader import read_completion
from tokenproxy.turn.reports import describe, report
from tokenproxy.turn.resume import Resume
from tokenproxy.turn.sending import PlannedTurn
from tokenproxy.turn.services import Services
from tokenproxy.turn.stream import RecordedStream

_IMAGE_OPTIONS = ("mm_processor_kwargs", "media_io_kwargs")
"""Fields that change what a model's processor makes of an image."""
_READ_ON_THREAD_BYTES = 65_536
"""Bytes of a completion from which it is read on a thread. Reading takes 0.3 ms for so many bytes, as long
as handing them to a thread; the work of `WORTH_A_THREAD_BYTES` takes longer per byte."""

_BREAKS_OFF = tuple(b'"%b"' % reason.encode() for reason in BROKEN_OFF)
"""What a completion holds with which its engine breaks off."""


async def serve_turn(request: ChatRequest, services: Services, answer: Answer | None = None) -> Response:
    """The response to a request: a completion, its stream of events, or an engine's error.

    What may be interrupted is owned by the stack: the attempt, the claims and pins of the plan, the engine's
    response. A stream takes the stack with it.

    Args:
        answer: what writes the response; None for the engine's own format.

    Raises:
        ApiError: the turn cannot be served; see `tokenproxy.base.errors`.
    """
    history = services.history
    async with AsyncExitStack() as stack:
        attempt = await stack.enter_async_context(Attempt(history, request))
        if (earlier := attempt.earlier) is not None:
            headers = [*earlier.headers, (b"x-request-replayed", b"true")]
            return BytesResponse(earlier.status, headers, earlier.body)
        if request.session_limit:
            await attempt.fail(200)  # nothing is kept: a retry is answered in the same way
            return await limit_answer(request, answer or Redactor(request.visible, request.engine_route))
        claims = await stack.enter_async_context(Claims(history.pins))
        request = await history.echoes.resolve(request)
        turn = await plan_turn(request, services, claims)
        if turn.plan.conversation is None:
            _check_unrecorded(request, turn.plan, services)
        recording = Recording(history, turn.plan, claims, turn.complete)
        response = await services.fleet.send(turn.send, turn.routing())
        if not isinstance(response, BytesResponse):
            stack.push_async_callback(response.aclose)
        plan, tag = turn.plan, turn.tag
        tag.progress = unknown  # until the stream is read
        recording.replica = turn.replica.name
        report(plan, response, history.metrics)
        if response.status >= 400:
            await attempt.fail(response.status)
            return BytesResponse(response.status, response.headers, await response.read())

        answer = answer or Redactor(turn.visible, request.engine_route)
        if plan.conversation is not None:
            answer.turn_id = plan.turn_id
        if not isinstance(response, BytesResponse) and isinstance(answer, StreamedAnswer):
            await recording.announce()
            cleanup = stack.pop_all()
            resume = Resume(turn, recording, answer, cleanup)
            return RecordedStream(response, answer, recording, attempt, cleanup, tag, resume)
        return await _whole(response, turn, answer, recording, attempt, stack)


def _check_unrecorded(request: ChatRequest, plan: PromptPlan, services: Services) -> None:
    """Refuse a turn that would be sampled without a record, where clients have keys.

    Keys for trainers may sample what cannot be placed or read, but not what is never recorded.

    Raises:
        Forbidden: its client may not sample it.
    """
    if request.must_record or (not request.record and services.settings.asks_for_keys):
        reason = request.special or plan.reason or "it names no session"
        raise Forbidden(
            f"it would be sampled without a record ({reason}), so that no limit of a session holds",
            code="route_not_recorded",
        )


async def _whole(
    response: Response,
    turn: PlannedTurn,
    answer: Answer,
    recording: Recording,
    attempt: Attempt,
    cleanup: AsyncExitStack,
) -> Response:
    """The response for a whole completion, which was recorded; see `RecordedStream` for a stream.

    Raises:
        ApiError: the client's answer cannot be made of the completion.
    """
    body = await response.read()
    completion, shown = await _read(body, turn, answer)
    if shown is None:
        resume = Resume(turn, recording, answer, cleanup)
        while shown is None:
            more = await resume.whole(body, completion)
            body = body if more is None else more
            completion, shown = await _read(body, turn, answer, final=more is None)
    await recording.add(completion)
    if isinstance(shown, ApiError):
        raise shown
    await answer.settle()
    if completion.broken_off:
        await attempt.fail(EngineBroken.status)  # a retry gets the whole answer
    else:
        await attempt.keep(response.status, response.headers, shown)
    return BytesResponse(response.status, response.headers, shown)


async def _read(
    body: bytes, turn: PlannedTurn, answer: Answer, *, final: bool = False
) -> tuple[Completion, bytes | ApiError | None]:
    """As `_read_now`, on a thread if it is long.

    What is neither recorded nor changed is read only if its engine may have broken off.
    """
    unread = turn.plan.conversation is None and answer.shows_all
    if unread and parsing.is_json(body) and not any(reason in body for reason in _BREAKS_OFF):
        return Completion(), answer.whole(wire.Completion(), body, Completion())
    if len(body) < _READ_ON_THREAD_BYTES:
        return _read_now(body, turn.plan, answer, final)
    return await turn.services.encoders.run(partial(_read_now, body, turn.plan, answer, final))


def _read_now(
    body: bytes, plan: PromptPlan, answer: Answer, final: bool
) -> tuple[Completion, bytes | ApiError | None]:
    """What is recorded of a whole completion, and what its client gets, which may be an error.

    That is None if the engine broke off and more may follow, which it does not after a `final` one.
    """
    whole = parsing.parse(body)
    completion = read_completion(whole, plan.prompt, plan.batch)
    if completion.broken_off and not final:
        return completion, None
    try:
        return completion, answer.whole(whole, body, completion)
    except ApiError as error:
        return completion, error


# --- planning


async def plan_turn(request: ChatRequest, services: Services, claims: Claims) -> PlannedTurn:
    """Plan a turn for the model that the fleet serves.

    Raises:
        BadRequest, Unsupported, NotReady: the prompt cannot be made; see `Planner.plan`.
        EngineUnavailable, EngineTimeout, EngineBroken: no replica responds.
    """
    model = await services.fleet.served_model()
    if request.needs_token_in:
        model.capabilities.require_token_in()
    with span("plan", {}) as planning:
        planner, served = services.history.planner, served_model(model, request, services)
        if request.given is not None:
            plan = await GivenPrompt(planner, request, served).plan(request.given, claims)
        else:
            plan = await planner.plan(request, served, claims)
        describe(planning, request, plan)
    return PlannedTurn(request, services, plan, model)


def served_model(model: FleetModel, request: ChatRequest, services: Services) -> ServedModel:
    """The model of the fleet, as planning needs it for a request."""
    capabilities, problem = model.capabilities, model.tokenizer_problem
    refused = None
    if capabilities.token_in is None:
        refused = Reason.NO_TOKEN_IN
    elif not capabilities.token_in.supports(request.fields):
        refused = Reason.SPECIAL_REQUEST
    images = placeholder = None
    if capabilities.images is not None:
        placeholder = capabilities.images.placeholder
        images = FleetImages(services.fleet, placeholder) if _images_fit(request) else None
    name = capabilities.model.name if capabilities.model else ""
    length = capabilities.model.max_model_len if capabilities.model else None
    rendered, mode = capabilities.rendered_fields, capabilities.logprobs_mode
    return ServedModel(name, model.tokenizer, problem, refused, rendered, mode, images, placeholder, length)


def _images_fit(request: ChatRequest) -> bool:
    """Whether images of a request can be sent with exact ids: its fields fit, and change no image's ids."""
    return GenerateTokenIn().supports(request.fields) and not any(
        raw_value(request.fields, name) for name in _IMAGE_OPTIONS
    )
