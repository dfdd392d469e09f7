"""Plans the prompt of one turn, sends it to a replica, and reports the plan.

The prompt is planned once, for the model that the fleet serves. The replica that runs it is chosen after
that, because the plan holds the conversation and the replica that has its ids cached.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from tokenproxy.base.errors import Unavailable
from tokenproxy.base.fields import flag, join, raw, raw_value, read, stream_options
from tokenproxy.base.http import Request, Response
from tokenproxy.base.request import ChatRequest, EngineRoute, ResumePolicy
from tokenproxy.base.types import Fields, Headers
from tokenproxy.engine.token_in import GenerateTokenIn, TokenRequest, rename_errors
from tokenproxy.fleet.choosing import BYTES_PER_ID, Routing, body_digest
from tokenproxy.fleet.model import FleetImages, FleetModel
from tokenproxy.fleet.replica import Replica
from tokenproxy.fleet.weight_tags import WeightTag, unknown
from tokenproxy.monitoring.exchange import running_exchange, span
from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.monitoring.spans import Span, Value
from tokenproxy.record.claims import Claims
from tokenproxy.record.completion import Completion
from tokenproxy.record.given import GivenPrompt
from tokenproxy.record.images import single_placeholders
from tokenproxy.record.plan import PromptPlan, ServedModel
from tokenproxy.record.turn import WeightSpan
from tokenproxy.record.vocabulary import Reason, Source
from tokenproxy.turn.required_prefix import render_with_prefix
from tokenproxy.turn.rest import Rest, begun_anew, can_resume, check_text, constrained, rest_fields
from tokenproxy.turn.segments import Segments
from tokenproxy.turn.services import Services

_IMAGE_OPTIONS = ("mm_processor_kwargs", "media_io_kwargs")
"""Fields that change what a model's processor makes of an image."""
_BAD_REQUEST = 400
_ASKS_WEIGHTS = "return_weight_versions"
_PROMPT_FIELDS: Mapping[str, str] = {EngineRoute.COMPLETIONS: "prompt", EngineRoute.GENERATE: "token_ids"}
_SESSION_HEADER = b"x-session-id"
_IMAGE_DATA = b";base64,"
"""In a URL with the data of an image, whose length tells nothing of the number of its ids."""
_TRUE = msgspec.Raw(b"true")
_NO_ALTERNATIVES = msgspec.Raw(b"0")
"""The number of alternatives with which the log-probabilities of sampled ids are requested."""


@dataclass(slots=True)
class PlannedTurn:
    """A turn, its plan, and the replica to which it was sent last."""

    request: ChatRequest
    services: Services
    plan: PromptPlan
    model: FleetModel
    """The model for which it was planned."""
    replica: Replica = field(init=False)
    """Only after it was sent."""
    tag: WeightTag = field(init=False)
    """The versions of the weights that sample it; only after it was sent."""
    conversation: str = field(init=False)
    """As in its `routing`; only after that was made."""
    hides_weights: bool = field(init=False, default=False)
    """Whether the engine was asked which weights sampled its ids, and not by the client."""
    aborts: int = field(init=False, default=0)
    """`FleetState.aborts` when all of it was sent."""
    parses_ids: bool = field(init=False, default=False)
    """Whether the engine of `send_rest` parses the ids from before the break too."""
    segments: Segments = field(init=False, default_factory=Segments)

    async def send(self, replica: Replica) -> Response:
        """Send the turn to a replica.

        Raises:
            Unavailable: the fleet serves another model since the turn was planned.
            ApiError: as `Engine.send`.
        """
        fields, request, plan = self._begin(replica), self.request, self.plan
        self.aborts = self.services.fleet.weights.state.aborts
        headers, route = _headers(request, plan), request.engine_route
        if plan.prompt and route is EngineRoute.CHAT:
            response = await self._send_ids(replica, fields, headers)
        else:  # the engine renders the prompt, or it stands in the fields
            call = Request("POST", route, headers, join(fields), repeatable=True)
            response = await replica.engine.send(call)
            if response.status == _BAD_REQUEST and route in _PROMPT_FIELDS:
                response = await rename_errors(response, _PROMPT_FIELDS[route])
        return response

    async def send_rest(self, rest: Rest, replica: Replica) -> Response:
        """Send what is left of one choice after a break.

        Raises:
            CannotGoOn: what the engine makes of the ids so far is not what the client got.
            Unavailable, ApiError: as `send`.
        """
        fields = rest_fields(self._begin(replica), rest)
        headers = _headers(self.request, self.plan)
        self.segments.begin_choice(rest.choice, self.tag)
        capabilities = replica.require_capabilities()
        self.parses_ids = capabilities.parses_ids and bool(rest.sampled)
        token_in = GenerateTokenIn() if self.parses_ids else capabilities.require_token_in()
        if rest.sampled and not self.parses_ids:
            await check_text(replica.engine, rest, self.request, headers)
        self.tag.progress = unknown
        completion = TokenRequest(rest.prompt, fields, headers, sampled=rest.sampled, check=rest.check)
        return await token_in.complete(replica.engine, completion)

    @property
    def resumable(self) -> bool:
        """Whether it may go on after its engine broke off."""
        off = self.services.settings.resume is ResumePolicy.OFF
        return not off and can_resume(self.request, self.plan)

    async def end_segment(self, sampled: Mapping[int, int] | None, why: str) -> None:
        """The engine broke off: what is sampled from now on belongs to another segment.

        Args: as `Segments.end`.
        """
        await self.segments.end(self.services.fleet.weights, self.tag, sampled, why)

    def _begin(self, replica: Replica) -> Fields:
        """The fields of the request for a replica, to which it is about to be sent."""
        if self.model is not self.services.fleet.model and self.model.difference(replica):
            raise Unavailable("the fleet serves another model since this request began: send it again")
        request, plan, services = self.request, self.plan, self.services
        self.replica, weights = replica, services.fleet.weights
        self.tag = weights.begin(replica, stream=request.stream)
        self.segments.begin(self.tag)
        recorded = plan.placement.conversation is not None
        fields = _request_for_engine(request, evidence=recorded or request.visible.on_messages)
        if services.settings.cache_salt_by_version and replica.weight_version is not None:
            fields.setdefault("cache_salt", raw(replica.weight_version))
        self.hides_weights = recorded and self._asks_weights(replica)
        if self.hides_weights:
            fields[_ASKS_WEIGHTS] = _TRUE
        return fields

    async def _send_ids(self, replica: Replica, fields: Fields, headers: Headers) -> Response:
        """Send a chat completion whose prompt is exact ids."""
        capabilities, images, single = replica.require_capabilities(), self.plan.images, b""
        prompt, given = self.plan.prompt, self.request.required_prefix or self.request.given
        token_in = GenerateTokenIn() if images else capabilities.require_token_in()
        if isinstance(token_in, GenerateTokenIn):
            self.tag.progress = unknown  # its response arrives as a whole
        if images:
            placeholder = capabilities.require_images().placeholder
            single = await self.services.encoders.run(
                lambda: single_placeholders(prompt, placeholder, images)
            )
        name = given.field if given else "messages"
        completion = TokenRequest(prompt, fields, headers, name, single, [each.image for each in images])
        return await token_in.complete(replica.engine, completion)

    def _asks_weights(self, replica: Replica) -> bool:
        """Whether the proxy asks an engine which weights sample the ids, because its client does not."""
        capabilities, request = replica.capabilities, self.request
        tells = capabilities is not None and capabilities.weight_versions
        # generate tells it in any case
        return (
            tells
            and request.engine_route is not EngineRoute.GENERATE
            and not flag(request.fields, _ASKS_WEIGHTS)
        )

    async def complete(self, completion: Completion) -> None:
        """Add their segments to choices that ended, and the weights that no engine reported.

        The fleet learns how many ids the conversation has now.
        """
        plan = self.plan
        prompt_ids = sum([prompt.reused + prompt.appended for prompt in plan.prompts])
        if plan.source is Source.RENDERED and completion.prompt_ids is not None:
            prompt_ids = completion.prompt_ids.count(b",") + 1
        if prompt_ids:  # an engine need not echo a prompt that it renders
            self.services.fleet.conversations.measure(self.conversation, prompt_ids, completion.sampled)
        await self.services.fleet.weights.confirm(self.tag)
        for choice in completion.choices:
            if self.segments:
                self.segments.add_to(choice, begun_anew(self.request.fields))
            elif not choice.weight_versions:
                spans, choice.weights_uncertain = self.tag.spans(choice.index, len(choice.ids or ()))
                choice.weight_versions = tuple(WeightSpan(*span) for span in spans)

    def routing(self) -> Routing:
        """The facts by which the fleet chooses a replica."""
        request, plan = self.request, self.plan
        ids, holder, prompts = 0, "", []
        beginning: tuple[bytes, ...] = (plan.prompt,)
        for prompt in plan.prompts:
            ids += prompt.reused + prompt.appended
            holder = holder or prompt.placement.holder
            if prompt.prompt and not prompt.placement.holder:
                prompts.append(prompt.prompt)
        context_ids = ids
        if plan.source is Source.RENDERED:
            ids = len(request.messages or request.retry.body) // BYTES_PER_ID
            beginning = (request.rendering.tools, request.messages)
            context_ids = 0 if _IMAGE_DATA in request.messages else sum(map(len, beginning)) // BYTES_PER_ID
        self.conversation = _conversation(plan) if not plan.others else plan.rollout or ""
        return Routing(
            conversation=self.conversation,
            holder=holder,
            prompts=prompts,
            ids=ids,
            context_ids=context_ids,
            beginning=beginning,
            tenant=request.tenant,
            model=request.model or "",
            completion=True,
            digest=lambda: body_digest(request.retry.path, request.retry.body),
            goes_on=self.resumable,
        )


async def plan_turn(request: ChatRequest, services: Services, claims: Claims) -> PlannedTurn:
    """Plan a turn for the model that the fleet serves.

    Raises:
        BadRequest, Unsupported, NotReady: the prompt cannot be made; see `Planner.plan`.
        PrefixRefused: the engine refuses to render the messages.
        EngineUnavailable, EngineTimeout, EngineBroken: no replica responds.
    """
    model = await services.fleet.served_model()
    if request.needs_token_in:
        model.capabilities.require_token_in()
    with span("plan", {}) as planning:
        planner, served = services.history.planner, served_model(model, request, services)
        given = GivenPrompt(planner, request, served)
        if request.given is not None:
            plan = await given.plan(request.given, claims)
        elif request.required_prefix is None:
            plan = await planner.plan(request, served, claims)
        else:
            prefix, fields, headers = request.required_prefix, request.fields, request.headers
            rendered = await render_with_prefix(prefix, fields, headers, model, services)
            plan = await given.plan_prefix(rendered.prompt, rendered.prefix, claims)
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


def _request_for_engine(request: ChatRequest, *, evidence: bool) -> Fields:
    """The fields of the request.

    Args:
        evidence: whether to request ids, usage and log-probabilities, to record them.
    """
    fields = dict(request.fields)
    if not evidence:
        return fields
    fields["return_token_ids"] = _TRUE
    match request.engine_route:
        case EngineRoute.CHAT:
            if raw_value(fields, "top_logprobs") in (None, b"0"):
                fields["logprobs"] = _TRUE
            if not request.visible.reasoning and not constrained(fields):
                # else vLLM hides ids too; the redactor removes the reasoning
                fields["include_reasoning"] = _TRUE
        case EngineRoute.COMPLETIONS:
            if raw_value(fields, "logprobs") is None:
                fields["logprobs"] = _NO_ALTERNATIVES
        case EngineRoute.GENERATE:
            sampling = read(fields, "sampling_params", Fields)
            if sampling is not None and raw_value(sampling, "logprobs") is None:
                sampling["logprobs"] = _NO_ALTERNATIVES
                fields["sampling_params"] = msgspec.Raw(join(sampling))
    if request.stream:
        usage = {"include_usage": _TRUE, "continuous_usage_stats": _TRUE}
        fields["stream_options"] = msgspec.Raw(join({**stream_options(fields), **usage}))
    return fields


def _headers(request: ChatRequest, plan: PromptPlan) -> Headers:
    """The client's headers, and the session: a router between proxy and engine can be sticky by it."""
    # the response is read here, so it must not be compressed
    headers = [pair for pair in request.headers if pair[0] != b"accept-encoding"]
    if plan.rollout is None:
        return headers
    headers = [pair for pair in headers if pair[0] != _SESSION_HEADER]
    return [*headers, (_SESSION_HEADER, plan.placement.session.name.encode())]


def _conversation(plan: PromptPlan) -> str:
    """A key that is equal for all turns of a conversation; empty if there is none.

    It is the rollout. If a history is recognised in none of its requests, each of them starts a new rollout;
    the key is then a digest of the messages up to the first assistant turn, which these requests share.
    """
    placement, conversation = plan.placement, plan.placement.conversation
    if not placement.new_rollout and conversation is not None:
        return placement.session.id
    first_turn = plan.reason is Reason.FIRST_TURN or plan.source is not Source.RENDERED
    if conversation is None or first_turn or not conversation.ends:
        return placement.session.id
    answer = conversation.messages[conversation.ends[-1]]
    return f"{placement.scope.tenant}/beginning/{answer.loose.hex()}"


# --- reports: headers, metrics, traces, the access log


def count_plan(plan: PromptPlan, metrics: Metrics) -> None:
    """Count the prompts of a request, once for each request, and note them for the access log."""
    for prompt in plan.prompts:
        metrics.prompts(prompt.source, prompt.reason or "none").inc()
        if prompt.reason == Reason.AMBIGUOUS:
            metrics.ambiguous.inc()
        if prompt.source is not Source.RENDERED:
            counter = metrics.reused_ids if prompt.source is Source.EXTENDED else metrics.given_ids
            counter.inc(prompt.reused)
            metrics.appended_ids.inc(prompt.appended)
    exchange = running_exchange()
    if exchange is not None and exchange.noting:
        exchange.note(_described(plan))


def describe(planning: Span, request: ChatRequest, plan: PromptPlan) -> None:
    """Add the plan to the span of planning, and the requested parameters to those of the request, with
    OpenTelemetry's names for generative AI."""
    if planning.recording:
        attributes = {f"tokenproxy.prompt.{name}": value for name, value in _described(plan).items()}
        planning.set({**attributes, "tokenproxy.prompt.candidates": plan.placement.match.candidates})
    exchange = running_exchange()
    if exchange is None or not exchange.span.recording:
        return
    max_tokens = raw_value(request.fields, "max_completion_tokens") or raw_value(request.fields, "max_tokens")
    exchange.engine_attributes = {
        "gen_ai.operation.name": ("chat" if request.engine_route is EngineRoute.CHAT else "text_completion"),
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": request.model or plan.placement.scope.model,
        "gen_ai.request.temperature": request.temperature,
        "gen_ai.request.max_tokens": int(max_tokens) if max_tokens and max_tokens.isdigit() else None,
        "gen_ai.request.choice.count": request.choices if request.choices > 1 else None,
        "gen_ai.request.stream": request.stream,
        "gen_ai.conversation.id": plan.placement.session.name if plan.rollout is not None else None,
    }
    exchange.span.set(exchange.engine_attributes)


def _described(plan: PromptPlan) -> dict[str, Value | None]:
    has_ids = plan.source is not Source.RENDERED
    return {
        "source": str(plan.source),
        "reason": str(plan.reason) if plan.reason else None,
        "session": plan.placement.session.name if plan.rollout is not None else None,
        "turn": plan.placement.turn_id if plan.placement.conversation is not None else None,
        "reused": sum(prompt.reused for prompt in plan.prompts) if has_ids else None,
        "appended": plan.appended if has_ids else None,
    }


def add_prompt_headers(response: Response, plan: PromptPlan) -> None:
    """Report on a successful response where its prompts came from and where their turns are recorded."""
    if response.status >= 400:
        return
    said, candidates = _described(plan), plan.placement.match.candidates
    headers = {
        b"x-prompt-source": said["source"],
        b"x-prompt-reused": said["reused"] or 0,
        b"x-prompt-appended": said["appended"],
        b"x-prompt-reason": said["reason"],
        b"x-prompt-candidates": candidates if candidates > 1 else None,
        b"x-session-id": said["session"],
        b"x-turn-id": said["turn"],
    }
    # an engine that is a tokenproxy itself has set these headers for its own prompt
    response.headers = [pair for pair in response.headers if pair[0] not in headers]
    for name, value in headers.items():
        if value is not None:
            response.headers.append((name, str(value).encode()))
