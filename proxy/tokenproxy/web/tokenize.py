"""The ids of prompts of which nothing is sampled.

- `POST /tokenize`: vLLM's contract, and two ways to continue a conversation that is already ids.
- `POST /v1/messages/count_tokens`: how many ids the prompt of a message has.
"""

import dataclasses

import msgspec

from tokenproxy.base.errors import BadRequest, NotFound, anthropic_error
from tokenproxy.base.fields import join, parse, raw, raw_value, read
from tokenproxy.base.http import JSON_HEADERS, BytesResponse, Request, Response, json_response
from tokenproxy.base.request import ChatRequest, media_kind
from tokenproxy.base.types import Fields
from tokenproxy.engine.protocol import fetch, problem_of
from tokenproxy.fleet.replica import Replica
from tokenproxy.formats.base import chat_request, visible_of
from tokenproxy.formats.chat import prefix_fields
from tokenproxy.formats.messages.format import MessagesFormat
from tokenproxy.formats.prompt_fields import (
    join_messages,
    media_fields,
    needs_ids,
    take_append,
    take_images,
    take_prompt,
)
from tokenproxy.record.claims import Claims
from tokenproxy.record.given import GivenPrompt, in_vocabulary
from tokenproxy.record.vocabulary import Source
from tokenproxy.turn.serve import plan_turn, served_model
from tokenproxy.turn.services import Services
from tokenproxy.web.base import Route, parse_bounded
from tokenproxy.web.keys import KeyScope
from tokenproxy.web.parameters import named_session

_TOKENIZE_PATH = "/tokenize"
_COUNT_PATH = "/v1/messages/count_tokens"


class Tokenize(Route):
    """Tokenises messages; appends messages to ids."""

    path = _TOKENIZE_PATH
    key_scope = KeyScope.TURNS
    needs_tenant = False  # vLLM requires no credential here
    summary = "Tokenise; append to ids; keep a prefix of ids"

    async def answer(self, request: Request, services: Services, /) -> Response:
        """`{"tokens", "count", "max_model_len"}`, and `appended` where messages were appended."""
        fields = await parse_bounded(request, services, lambda: parse(request.body))
        if await services.model_aliases.map_fields(fields, services.fleet):
            request = dataclasses.replace(request, body=join(fields))
        chat = await parse_bounded(request, services, lambda: _chat_request(request, fields))
        if chat is None:
            call = Request("POST", _TOKENIZE_PATH, request.headers, request.body, repeatable=True)
            return await services.fleet.ask(lambda replica: replica.engine.send(call))
        return await _append(chat, services)


def _chat_request(request: Request, fields: Fields) -> ChatRequest | None:
    """The request to append messages to ids; None if it is one of vLLM's own.

    Raises:
        BadRequest: the ids or the messages are missing or wrong.
    """
    if prefix := prefix_fields(fields):
        return chat_request(request, fields, None, visible_of(fields), **prefix)
    ids = take_prompt(fields)
    if ids is None:
        if raw_value(fields, "append_messages") is None:
            return None
        raise needs_ids()
    append = take_append(fields, ids)
    if append is None:
        raise BadRequest.of("append_messages", "is required with ids")
    messages = raw_value(fields, "messages")
    return chat_request(
        request,
        fields,
        None,
        visible_of(fields),
        given=ids,
        append=append,
        images=take_images(fields),
        media=media_fields(messages=messages, append_messages=append),
        messages=join_messages(messages, append),
    )


async def _append(request: ChatRequest, services: Services) -> Response:
    """The whole next prompt, and the number of appended ids."""
    ids, fields, fleet, name = request.given, request.fields, services.fleet, request.model
    assert ids is not None  # checked by the caller
    if name is not None and not await fleet.ask(lambda replica: replica.serves(name)):
        raise NotFound(f"The model `{name}` does not exist.", param="model")
    fleet_model = await fleet.served_model()
    tokenizer = fleet_model.require_tokenizer()
    model = served_model(fleet_model, request, services)
    prompt = GivenPrompt(services.history.planner, request, model)
    if request.images is not None or (request.media and model.images is None):
        ids, _ = await prompt.place_images(ids)
    made = await prompt.append(ids, to_complete=False)
    strings = read(fields, "return_token_strs", bool) or False

    def check() -> list[str] | None:
        values = in_vocabulary(made.prompt, tokenizer, ids.field)
        return tokenizer.token_strings(values) if strings else None

    token_strs = await services.encoders.run(check)
    return json_response(
        {
            "count": ids.count + made.appended,
            "max_model_len": model.max_model_len,
            "tokens": msgspec.Raw(made.prompt),
            "token_strs": token_strs,
            "appended": made.appended,
        }
    )


class _Counted(msgspec.Struct):
    """The count in a response of the engine, by its names on the two routes."""

    count: int = 0
    input_tokens: int = 0


class CountTokens(Route):
    """Counts the ids of the prompt that a request for a message would have; samples nothing."""

    path = _COUNT_PATH
    key_scope = KeyScope.TURNS
    summary = "Number of ids of a message's prompt"

    async def answer(self, request: Request, services: Services, /) -> Response:
        """`{"input_tokens"}`: of a recorded conversation its own ids, else what the engine renders."""
        session = await named_session(request, services)
        messages = MessagesFormat(await services.fleet.served_model())
        chat = await parse_bounded(request, services, lambda: messages.parse_count(request, session))
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
    call = _tokenize_call(request, chat)
    if _has_media(chat):
        own = Request("POST", _COUNT_PATH, request.headers, request.body, repeatable=True)
        status, body = await fetch(replica.engine, own)
        if status not in (404, 405):
            return _response(status, body)
    return _response(*await fetch(replica.engine, call))


def _tokenize_call(request: Request, chat: ChatRequest) -> Request:
    rendering = chat.rendering
    fields = {"messages": msgspec.Raw(chat.messages)}
    if rendering.tools:
        fields["tools"] = msgspec.Raw(rendering.tools)
    if rendering.template_kwargs:
        fields["chat_template_kwargs"] = msgspec.Raw(rendering.template_kwargs)
    fields["add_generation_prompt"] = raw(rendering.add_generation_prompt)
    headers = [pair for pair in request.headers if pair[0] not in (b"content-length", b"accept-encoding")]
    return Request("POST", _TOKENIZE_PATH, headers, join(fields), repeatable=True)


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
