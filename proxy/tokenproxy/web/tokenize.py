"""`POST /tokenize`: vLLM's contract, and two ways to continue a conversation that is already ids."""

import dataclasses

import msgspec

from tokenproxy.base.errors import BadRequest, NotFound
from tokenproxy.base.fields import join, parse, raw_value, read
from tokenproxy.base.http import Request, Response, json_response
from tokenproxy.base.request import ChatRequest, RequiredPrefix
from tokenproxy.base.types import Fields, Headers
from tokenproxy.formats.base import chat_request, visible_of
from tokenproxy.formats.prompt_fields import (
    join_messages,
    media_fields,
    needs_ids,
    take_append,
    take_images,
    take_prompt,
)
from tokenproxy.record.given import GivenPrompt
from tokenproxy.turn.required_prefix import PrefixRefused, in_vocabulary, render_with_prefix, take_prefix
from tokenproxy.turn.sending import served_model
from tokenproxy.turn.services import Services
from tokenproxy.web.base import Route, parsed

_PATH = "/tokenize"


class Tokenize(Route):
    """Tokenises messages; appends messages to ids; renders a history around ids."""

    path = _PATH
    needs_tenant = False  # vLLM requires no credential here
    summary = "Tokenise; append to ids; keep a prefix of ids"

    async def answer(self, request: Request, services: Services, /) -> Response:
        """`{"tokens", "count", "max_model_len"}`, and `appended` where messages were appended."""
        fields = await parsed(request, services, lambda: parse(request.body))
        if await services.model_aliases.map_fields(fields, services.fleet):
            request = dataclasses.replace(request, body=join(fields))
        prefix = await parsed(request, services, lambda: take_prefix(fields))
        if prefix is not None:
            return await _keep_prefix(prefix, fields, request.headers, services)
        chat = await parsed(request, services, lambda: _chat_request(request, fields))
        if chat is None:
            call = Request("POST", _PATH, request.headers, request.body, repeatable=True)
            return await services.fleet.ask(lambda replica: replica.engine.send(call))
        return await _append(chat, services)


def _chat_request(request: Request, fields: Fields) -> ChatRequest | None:
    """The request to append messages to ids; None if it is one of vLLM's own.

    Raises:
        BadRequest: the ids or the messages are missing or wrong.
    """
    ids = take_prompt(fields)
    if ids is None:
        if raw_value(fields, "append_messages") is None:
            return None
        raise needs_ids()
    append = take_append(fields, ids)
    if append is None:
        raise BadRequest("`append_messages` is required with ids", param="append_messages")
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
        raise NotFound(f"The model `{name}` does not exist.", param="model", code="model_not_found")
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


async def _keep_prefix(
    prefix: RequiredPrefix, fields: Fields, headers: Headers, services: Services
) -> Response:
    """The template's rendering of a history, with the model's own tokens up to the last assistant turn."""
    model = await services.fleet.served_model()
    try:
        spliced = await render_with_prefix(prefix, fields, headers, model, services)
    except PrefixRefused as refused:
        return refused.response
    tokens = msgspec.json.decode(spliced.prompt, type=list[int])
    token_strs = None
    if read(fields, "return_token_strs", bool):
        tokenizer = model.require_tokenizer()
        token_strs = await services.encoders.run(lambda: tokenizer.token_strings(tokens))
    return json_response(
        {
            **spliced.rendered,
            "tokens": msgspec.Raw(spliced.prompt),
            "count": len(tokens),
            "token_strs": token_strs,
        }
    )
