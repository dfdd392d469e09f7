"""Sends a planned turn, or the rest of one, to a replica, and keeps by which weights it is sampled where.

The prompt is planned once, for the model that the fleet serves. The replica that runs it is chosen after
that, because the plan holds the conversation and the replica that has its ids cached.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from tokenproxy.base.errors import Unavailable
from tokenproxy.base.evidence import ASKED
from tokenproxy.base.fields import join, raw, raw_value, read, stream_options
from tokenproxy.base.http import Request, Response
from tokenproxy.base.request import EVERYTHING, ChatRequest, EngineRoute, ResumePolicy, Visible
from tokenproxy.base.types import Fields, Headers
from tokenproxy.engine.protocol import TokenRequest
from tokenproxy.engine.token_in import GenerateTokenIn, rename_errors
from tokenproxy.fleet.choosing import BYTES_PER_ID, Routing, request_digest
from tokenproxy.fleet.model import FleetModel
from tokenproxy.fleet.replica import Replica
from tokenproxy.fleet.weight_state import WeightTag, unknown
from tokenproxy.fleet.weights import Weights
from tokenproxy.record.completion import Completion, SampledChoice
from tokenproxy.record.images import single_placeholders
from tokenproxy.record.plan import PromptPlan
from tokenproxy.record.turn import Segment, WeightSpan
from tokenproxy.record.vocabulary import Reason, Source
from tokenproxy.turn.rest import Rest, begun_anew, check_text, constrained, is_whole_only, rest_fields
from tokenproxy.turn.services import Services

_BAD_REQUEST = 400
_PROMPT_FIELDS: Mapping[str, str] = {EngineRoute.COMPLETIONS: "prompt", EngineRoute.GENERATE: "token_ids"}
_SESSION_HEADER = b"x-session-id"
_IMAGE_DATA = b";base64,"
"""In a URL with the data of an image, whose length tells nothing of the number of its ids."""
_TRUE = msgspec.Raw(b"true")
_NO_ALTERNATIVES = msgspec.Raw(b"0")
"""The number of alternatives with which the log-probabilities of sampled ids are requested."""


@dataclass(slots=True)
class _Part:
    """A segment of a turn, before it is known how many ids its choices have."""

    tag: WeightTag
    """Of all choices that have none in `tags`."""
    before: Mapping[int, int] | None = None
    """How many ids each choice had that had not ended, by its index; None in the first part: none."""
    ended: str = ""
    """As `Segment.ended`."""
    tags: dict[int, WeightTag] = field(default_factory=dict)
    """Of the choices that were resumed, by their index."""


@dataclass(slots=True)
class Segments:
    """The segments of one turn; false as long as its engine did not break off."""

    _parts: list[_Part] = field(default_factory=list)
    """Those that ended, and the one that runs."""
    _dropped: list[Segment] = field(default_factory=list)
    """Those whose ids do not count, because the turn was sampled anew."""

    def __bool__(self) -> bool:
        return bool(self._parts)

    def begin(self, tag: WeightTag) -> None:
        """The turn is sent to a replica, with this tag."""
        if self._parts:
            self._parts[-1].tag = tag

    def begin_choice(self, choice: int, tag: WeightTag) -> None:
        """The rest of one choice, given its index, is sent to a replica."""
        self._parts[-1].tags[choice] = tag

    async def end(
        self, weights: Weights, tag: WeightTag, sampled: Mapping[int, int] | None, why: str
    ) -> None:
        """The engine broke off: what is sampled from now on belongs to another segment.

        Args:
            tag: of what was sent last.
            sampled: number of the ids so far of each choice that has not ended; None if the turn is sampled
                anew.
            why: why it broke off.
        """
        ended = self._parts[-1] if self._parts else _Part(tag)
        for each in (ended.tag, *ended.tags.values()):
            await weights.confirm(each)
            each.end()
        ended.ended = why
        if sampled is None:
            self._dropped.append(Segment(ended.tag.replica, 0, 0, why))
            self._parts = [_Part(tag)]
        else:
            self._parts = [*self._parts[:-1], ended, _Part(tag, sampled)]

    def add_to(self, choice: SampledChoice, began_anew: tuple[str, ...]) -> None:
        """Add its segments and their weights to a choice that ended.

        Args:
            began_anew: fields of the request that take no note of the segments before.
        """
        index, count, told = choice.index, len(choice.ids or ()), choice.weight_versions
        parts = [part for part in self._parts if part.before is None or index in part.before]
        starts = [part.before[index] if part.before else 0 for part in parts]
        segments: list[Segment] = [*self._dropped]
        spans: list[WeightSpan] = []
        for part, start, end in zip(parts, starts, [*starts[1:], count], strict=True):
            tag = part.tags.get(index, part.tag)
            segments.append(Segment(tag.replica, start, end, "" if part is parts[-1] else part.ended))
            if start == end:
                continue  # the engine broke off before it sampled
            reported = [span for span in told if start <= span.start < end]
            if not reported:
                known, uncertain = tag.spans(index, end - start)
                reported = [WeightSpan(version, start + at, start + to) for version, at, to in known]
                choice.weights_uncertain |= uncertain
            spans += reported
        choice.segments, choice.weight_versions = tuple(segments), tuple(spans)
        choice.began_anew = began_anew if len(segments) > 1 else ()


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
    def visible(self) -> Visible:
        """What the client gets of the engine's response, of which more is requested if it is recorded."""
        visible = self.request.visible
        return visible if self._with_evidence or not visible.reasoning else EVERYTHING

    @property
    def _with_evidence(self) -> bool:
        """Whether ids, usage and log-probabilities are requested of the engine in any case."""
        return self.plan.conversation is not None or self.request.visible.on_messages

    @property
    def resumable(self) -> bool:
        """Whether it may go on after its engine broke off, wherever that is."""
        request, conversation = self.request, self.plan.conversation
        return not (
            self.services.settings.resume is ResumePolicy.OFF
            or request.engine_route is not EngineRoute.CHAT
            or conversation is None
            or conversation.media
            or request.prompt_media
            or self.plan.images
            or is_whole_only(request.fields)
        )

    @property
    def conversation(self) -> str:
        """A key that is equal for all turns of a conversation; empty if there is none.

        It is the rollout. If a history is recognised in none of its requests, each of them starts a new
        rollout; the key is then a digest of the messages up to the first assistant turn, which these requests
        share.
        """
        plan, conversation = self.plan, self.plan.conversation
        if plan.others:
            return plan.rollout or ""
        rendered = plan.source is Source.RENDERED and plan.reason is not Reason.FIRST_TURN
        if not (plan.new_rollout and rendered) or conversation is None or not conversation.ends:
            return plan.session.id
        answer = conversation.messages[conversation.ends[-1]]
        return f"{plan.scope.tenant}/beginning/{answer.loose.hex()}"

    def _begin(self, replica: Replica) -> Fields:
        """The fields of the request for a replica, to which it is about to be sent."""
        if self.model is not self.services.fleet.model and self.model.difference(replica):
            raise Unavailable("the fleet serves another model since this request began: send it again")
        request, plan, services = self.request, self.plan, self.services
        self.replica, weights = replica, services.fleet.weights
        self.tag = weights.begin(replica, stream=request.stream)
        self.segments.begin(self.tag)
        fields = _request_for_engine(request, evidence=self._with_evidence)
        if services.settings.cache_salt_by_version and replica.weight_version is not None:
            fields.setdefault("cache_salt", raw(replica.weight_version))
        if plan.conversation is not None and replica.capabilities is not None:
            tells, route = replica.capabilities.tells, request.engine_route
            asks = [fact.asked_by for fact in ASKED if fact.name in tells and route not in fact.unasked]
            fields |= dict.fromkeys(asks, _TRUE)
        return fields

    async def _send_ids(self, replica: Replica, fields: Fields, headers: Headers) -> Response:
        """Send a chat completion whose prompt is exact ids."""
        capabilities, images, single = replica.require_capabilities(), self.plan.images, b""
        prompt, given = self.plan.prompt, self.request.given
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
            holder = holder or prompt.holder
            if prompt.prompt and not prompt.holder:
                prompts.append(prompt.prompt)
        context_ids = ids
        if plan.source is Source.RENDERED:
            ids = len(request.messages or request.retry.body) // BYTES_PER_ID
            beginning = (request.rendering.tools, request.messages)
            context_ids = 0 if _IMAGE_DATA in request.messages else sum(map(len, beginning)) // BYTES_PER_ID
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
            digest=lambda: request_digest(
                request.retry.path,
                request.retry.body,
                plan.session.id if plan.session.explicit else request.tenant,
            ),
            goes_on=self.resumable,
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
    session = None if plan.rollout is None else plan.session.name
    replaced = (b"accept-encoding",) if session is None else (b"accept-encoding", _SESSION_HEADER)
    headers = [pair for pair in request.headers if pair[0] not in replaced]
    if session is not None:
        headers.append((_SESSION_HEADER, session.encode()))
    return headers
