"""`POST /v1/messages/count_tokens`: how many ids the prompt of a message has."""

import msgspec

from tokenproxy.base.error_formats import anthropic_error
from tokenproxy.base.errors import BadRequest
from tokenproxy.base.fields import join, raw
from tokenproxy.base.http import JSON_HEADERS, BytesResponse, Request, Response, json_response
from tokenproxy.base.media import media_kind
from tokenproxy.base.request import ChatRequest
from tokenproxy.engine.protocol import fetch
from tokenproxy.fleet.replica import Replica
from tokenproxy.formats.messages.format import MessagesFormat
from tokenproxy.record.claims import Claims
from tokenproxy.record.vocabulary import Source
from tokenproxy.turn.sending import plan_turn
from tokenproxy.turn.services import Services
from tokenproxy.turn.wire import problem_of
from tokenproxy.web.base import Route, parsed
from tokenproxy.web.parameters import named_session

_PATH = "/v1/messages/count_tokens"


class _Counted(msgspec.Struct):
    """The count in a response of the engine, by its names on the two routes."""

    count: int = 0
    input_tokens: int = 0


class CountTokens(Route):
    """Counts the ids of the prompt that a request for a message would have; samples nothing."""

    path = _PATH
    summary = "Number of ids of a message's prompt"

    async def answer(self, request: Request, services: Services, /) -> Response:
        """`{"input_tokens"}`: of a recorded conversation its own ids, else what the engine renders."""
        session = await named_session(request, services)
        messages = MessagesFormat(await services.fleet.served_model())
        chat = await parsed(request, services, lambda: messages.parse_count(request, session))
        chat = await services.model_aliases.map(chat, services.fleet)
        chat = await services.history.echoes.resolve(chat)
        count = await _recorded(chat, services)
        if count is not None:
            return json_response({"input_tokens": count})
        return await services.fleet.ask(lambda replica: _rendered(request, chat, replica))


async def _recorded(chat: ChatRequest, services: Services) -> int | None:
    """The number of ids if the prompt extends recorded ids; None if it does not, or does not fit."""
    try:
        async with Claims(services.history.pins) as claims:
            plan = (await plan_turn(chat, services, claims)).plan
    except BadRequest:
        return None  # the engine counts what is too long, and explains what is wrong
    return plan.reused + plan.appended if plan.source is Source.EXTENDED else None


async def _rendered(request: Request, chat: ChatRequest, replica: Replica) -> Response:
    """The number of ids that an engine renders. Of images only its own route knows the number of ids."""
    call = _tokenize(request, chat)
    if _has_media(chat):
        own = Request("POST", _PATH, request.headers, request.body, repeatable=True)
        status, body = await fetch(replica.engine, own)
        if status not in (404, 405):
            return _response(status, body)
    return _response(*await fetch(replica.engine, call))


def _tokenize(request: Request, chat: ChatRequest) -> Request:
    rendering = chat.rendering
    fields = {"messages": msgspec.Raw(chat.messages)}
    if rendering.tools:
        fields["tools"] = msgspec.Raw(rendering.tools)
    if rendering.template_kwargs:
        fields["chat_template_kwargs"] = msgspec.Raw(rendering.template_kwargs)
    fields["add_generation_prompt"] = raw(rendering.add_generation_prompt)
    headers = [pair for pair in request.headers if pair[0] not in (b"content-length", b"accept-encoding")]
    return Request("POST", "/tokenize", headers, join(fields), repeatable=True)


def _has_media(chat: ChatRequest) -> bool:
    messages = msgspec.json.decode(chat.messages)
    contents = (message.get("content") for message in messages)
    return any(isinstance(content, list) and media_kind(content) is not None for content in contents)


def _response(status: int, body: bytes) -> Response:
    if status >= 400:
        message = problem_of(body).message
        return BytesResponse(status, list(JSON_HEADERS), anthropic_error(status, message))
    counted = msgspec.json.decode(body, type=_Counted)
    return json_response({"input_tokens": counted.count or counted.input_tokens})
