"""Serves one chat turn of any wire format; a completions request with several prompts is a turn for each.

1. A retry gets the response of the request it repeats; a session that reached a limit gets a final answer.
2. The prompt is planned, then a replica is chosen that completes it. After a failure another replica gets it.
3. What was sampled is recorded before the client gets the end of its response.
"""

from contextlib import AsyncExitStack
from functools import partial

from tokenproxy.base.errors import ApiError, EngineBroken
from tokenproxy.base.http import BytesResponse, Response
from tokenproxy.base.request import ChatRequest
from tokenproxy.fleet.weight_tags import unknown
from tokenproxy.record.claims import Claims
from tokenproxy.record.completion import Completion
from tokenproxy.record.plan import PromptPlan
from tokenproxy.record.recorder import Recording
from tokenproxy.record.retries import Attempt
from tokenproxy.turn import parsing
from tokenproxy.turn.answer import Answer, Redactor, StreamedAnswer, limit_answer
from tokenproxy.turn.reader import read_completion
from tokenproxy.turn.required_prefix import PrefixRefused
from tokenproxy.turn.resume import Resume
from tokenproxy.turn.sending import add_prompt_headers, count_plan, plan_turn
from tokenproxy.turn.services import Services
from tokenproxy.turn.stream import RecordedStream

_READ_ON_THREAD_BYTES = 65_536
"""Bytes of a completion from which it is read on a thread. Reading takes 0.3 ms for so many bytes, as long
as handing them to a thread; the work of `WORTH_A_THREAD_BYTES` takes longer per byte."""


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
    answer = answer or Redactor(request.visible, request.engine_route)
    async with AsyncExitStack() as stack:
        attempt = await stack.enter_async_context(Attempt(history, request))
        if (earlier := attempt.earlier) is not None:
            headers = [*earlier.headers, (b"x-request-replayed", b"true")]
            return BytesResponse(earlier.status, headers, earlier.body)
        if request.session_limit:
            await attempt.fail(200)  # nothing is kept: a retry is answered in the same way
            return await limit_answer(request, answer)
        claims = await stack.enter_async_context(Claims(history.pins))
        try:
            request = await history.echoes.resolve(request)
            turn = await plan_turn(request, services, claims)
        except PrefixRefused as refused:
            await attempt.fail(refused.response.status)
            return refused.response
        recording = Recording(history, turn.plan, claims, turn.complete)
        response = await services.fleet.send(turn.send, turn.routing())
        if not isinstance(response, BytesResponse):
            stack.push_async_callback(response.aclose)
        plan, tag = turn.plan, turn.tag
        tag.progress = unknown  # until the stream is read
        recording.replica = turn.replica.name
        count_plan(plan, history.metrics)
        add_prompt_headers(response, plan)
        if response.status >= 400:
            await attempt.fail(response.status)
            return BytesResponse(response.status, response.headers, await response.read())

        answer.hides_weights = turn.hides_weights
        if plan.placement.conversation is not None:
            answer.turn_id = plan.placement.turn_id
        if not isinstance(response, BytesResponse) and isinstance(answer, StreamedAnswer):
            await recording.announce()
            cleanup = stack.pop_all()
            resume = Resume(turn, recording, answer, cleanup)
            return RecordedStream(response, answer, recording, attempt, cleanup, tag, resume)
        body = await response.read()
        completion, shown = await _read(body, plan, answer, services)
        if shown is None:
            resume = Resume(turn, recording, answer, stack)
            while shown is None and (more := await resume.whole(body, completion)):
                body = more
                completion, shown = await _read(body, plan, answer, services)
            if shown is None:
                completion, shown = await _read(body, plan, answer, services, final=True)
            assert shown is not None  # the last one is
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
    body: bytes, plan: PromptPlan, answer: Answer, services: Services, *, final: bool = False
) -> tuple[Completion, bytes | ApiError | None]:
    """As `_read_now`, on a thread if it is long."""
    if len(body) < _READ_ON_THREAD_BYTES:
        return _read_now(body, plan, answer, final)
    return await services.encoders.run(partial(_read_now, body, plan, answer, final))


def _read_now(
    body: bytes, plan: PromptPlan, answer: Answer, final: bool
) -> tuple[Completion, bytes | ApiError | None]:
    """What is recorded of a whole completion, and what its client gets, which may be an error.

    That is None if the engine broke off and more may follow, which it does not after a `final` one.
    """
    batch = plan.batch
    parsed = parsing.parse(body, tokens=answer.reads_tokens, whole=True, one_prompt=batch is None)
    completion = read_completion(parsed, plan.prompt, batch)
    if completion.broken_off and not final:
        return completion, None
    try:
        return completion, answer.whole(parsed, body, completion)
    except ApiError as error:
        return completion, error
