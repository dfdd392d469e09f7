"""`POST /v1/chat/completions`: plain OpenAI, kept exact with no help from the client.

The conversation that a request continues is recognised, its recorded ids are sent to the engine with what the
template puts behind them, and what is sampled is recorded before the client has the end of the answer.
"""

from dataclasses import replace

import msgspec

from proxy.engine.token_in import CHAT_PATH, TokenRequest
from proxy.errors import BadRequest
from proxy.fields import given, join, parse, raw, read
from proxy.fleet.replica import Replica
from proxy.history.conversation import Asked, Setting
from proxy.history.plan import Plan
from proxy.history.retries import Attempt
from proxy.http import BytesResponse, Request, Response
from proxy.routes.base import Route
from proxy.turn.completion import Wanted
from proxy.turn.prompt_fields import template_kwargs
from proxy.turn.prompt_headers import placed, said
from proxy.turn.required_prefix import FIELD as PREFIX_FIELD
from proxy.turn.required_prefix import keep_prefix
from proxy.turn.serve import Conclusion, recorded_answer
from proxy.turn.services import Services
from proxy.turn.session_fields import apply_session, session_of
from proxy.types import Fields, Headers
from tokenization import ids

_TRUE = msgspec.Raw(b"true")
_SPECIAL = ("echo", "continue_final_message", "add_special_tokens", "return_prompt_text", "use_beam_search")
"""Fields that ask for another rendering, or for something that ids cannot give."""


class Chat(Route):
    """Answers as the engine would, and lets it go on from the ids it knows."""

    path = CHAT_PATH
    summary = "Chat completion, token-exact over turns"

    async def answer(self, incoming: Request, gateway: Services) -> Response:
        """A chat completion, or its stream of chunks; ids and log-probabilities only where asked for."""
        fields = parse(incoming.body)
        session = session_of(incoming.headers)
        wanted = wanted_of(fields)
        if session is not None:
            await apply_session(fields, session, gateway)
        conclusion = Conclusion(gateway, Attempt(incoming.headers, incoming.body, session))
        replay = await conclusion.begin()
        if replay is not None:
            return replay
        turn = _Request(fields, understood(fields, session), wanted, incoming.headers, gateway, conclusion)
        prefix = given(fields, PREFIX_FIELD) is not None
        work = turn.complete_with_prefix if prefix else turn.complete
        async with conclusion.watched():
            return await gateway.fleet.on_replica(work, token_in=prefix)


class _Request:
    """One request on its way through an engine."""

    def __init__(
        self,
        fields: Fields,
        asked: Asked,
        wanted: Wanted,
        headers: Headers,
        gateway: Services,
        conclusion: Conclusion,
    ) -> None:
        self._fields = fields
        self._asked = asked
        self._wanted = wanted
        # what comes back is read here, so it must not be compressed
        self._headers = [pair for pair in headers if pair[0] != b"accept-encoding"]
        self._gateway = gateway
        self._conclusion = conclusion

    async def complete(self, replica: Replica) -> Response:
        """Plan the prompt, run the completion on one replica, record what comes back."""
        token_in = replica.known().token_in
        if token_in is not None and not token_in.takes(self._fields):
            self._asked.special = self._asked.special or "special_request"
        plan = await self._gateway.rollouts.plan(self._asked, replica)
        fields = with_evidence(self._fields, self._gateway)
        if plan.prompt:
            request = TokenRequest(plan.prompt, fields, self._headers, "messages")
            answer = await replica.known().require_token_in().complete(replica.engine, request)
        else:
            call = Request("POST", CHAT_PATH, self._headers, join(fields), repeatable=True)
            answer = await replica.engine.send(call)
        return await self._recorded(answer, plan)

    async def complete_with_prefix(self, replica: Replica) -> Response:
        """The same on the template's rendering with the ids that the client requires of its first part."""
        kept = await keep_prefix(self._fields, self._headers, replica, self._gateway)
        if isinstance(kept, BytesResponse):
            await self._conclusion.refused(kept.status)
            return kept
        prompt = await self._gateway.in_thread(lambda: ids.dump(kept.tokens))
        asked = replace(self._asked, special="prefix_given")
        plan = await self._gateway.rollouts.plan_given(asked, replica, prompt, "given", whole=True)
        fields = with_evidence(self._fields, self._gateway)
        del fields[PREFIX_FIELD]
        request = TokenRequest(prompt, fields, self._headers, PREFIX_FIELD)
        answer = await replica.known().require_token_in().complete(replica.engine, request)
        said(
            answer,
            source="given",
            reused=kept.prefix,
            appended=len(kept.tokens) - kept.prefix,
            reason="prefix_given",
        )
        return await recorded_answer(
            placed(answer, plan), plan, self._wanted, self._gateway, self._conclusion
        )

    async def _recorded(self, answer: Response, plan: Plan) -> Response:
        appended = len(plan.added) if plan.source == "extended" else None
        said(answer, source=plan.source, reused=plan.reused, appended=appended, reason=plan.reason or None)
        placed(answer, plan)
        return await recorded_answer(answer, plan, self._wanted, self._gateway, self._conclusion)


def wanted_of(fields: Fields) -> Wanted:
    """What the client wants to see of what is recorded."""
    options = _stream_options(fields)
    usage = _flag(options, "include_usage")
    running = usage and _flag(options, "continuous_usage_stats")
    reasoning = given(fields, "include_reasoning") not in (b"false", b"0")
    ids_wanted, logprobs = _flag(fields, "return_token_ids"), _flag(fields, "logprobs")
    return Wanted(ids_wanted and reasoning, logprobs and reasoning, usage, running, reasoning)


def with_evidence(fields: Fields, gateway: Services) -> Fields:
    """A request that asks the engine for what is recorded."""
    asking = {**fields, "return_token_ids": _TRUE}
    if gateway.record_logprobs and given(fields, "top_logprobs") in (None, b"0"):
        asking["logprobs"] = _TRUE
    if not wanted_of(fields).reasoning and not _constrained(fields):
        asking["include_reasoning"] = _TRUE  # vLLM hides ids with it; it is taken out of the answer here
    if _flag(fields, "stream"):
        usage = {"include_usage": _TRUE, "continuous_usage_stats": _TRUE}
        asking["stream_options"] = msgspec.Raw(join({**_stream_options(fields), **usage}))
    return asking


def _constrained(fields: Fields) -> bool:
    """Whether a grammar shapes the answer: whether reasoning is included tells vLLM when it begins."""
    names = ("response_format", "structured_outputs")
    free = (None, b'"none"', b'"auto"')
    return any(given(fields, name) for name in names) or given(fields, "tool_choice") not in free


def _stream_options(fields: Fields) -> Fields:
    """What a stream is to hold; what is no object is the engine's to refuse."""
    try:
        return read(fields, "stream_options", Fields) or {}
    except BadRequest:
        return {}


def understood(fields: Fields, session: str | None) -> Asked:
    """What a request asks of the conversation; `special` where it cannot be known or kept."""
    special = _special(fields)
    setting = Setting()
    try:
        kwargs = template_kwargs(fields)
        if (template := read(fields, "chat_template", str)) is not None:
            kwargs["chat_template"] = template
        setting = Setting(
            given(fields, "tools") or b"",
            bytes(raw(kwargs)) if kwargs else b"",
            read(fields, "add_generation_prompt", bool) is not False,
        )
        model = read(fields, "model", str)
    except BadRequest:
        model, special = None, special or "special_request"
    choices = _number(fields, "n") or 1
    temperature = _number(fields, "temperature")
    messages = given(fields, "messages") or b""
    return Asked(messages, setting, model, session, max(1, int(choices)), temperature, special)


def _number(fields: Fields, name: str) -> float | None:
    """A number of a request; what is none is the engine's to refuse."""
    try:
        return read(fields, name, float)
    except BadRequest:
        return None


def _special(fields: Fields) -> str:
    if given(fields, "chat_template") is not None:
        return "custom_template"
    try:
        if "prompt_token_ids" in (read(fields, "kv_transfer_params", Fields) or {}):
            return "ids_given"
    except BadRequest:
        return "special_request"
    beside = any(_flag(fields, name) for name in _SPECIAL)
    return "special_request" if beside or given(fields, "truncate_prompt_tokens") is not None else ""


def _flag(fields: Fields, name: str) -> bool:
    return given(fields, name) not in (None, b"false", b"0")
