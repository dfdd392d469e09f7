"""`POST /tokenize`: vLLM's own contract, and two ways to continue a conversation that is already ids."""

import msgspec

from proxy.errors import BadRequest, NotFound
from proxy.fields import given, parse, read
from proxy.fleet.replica import Replica
from proxy.http import JSON_HEADERS, BytesResponse, Request, Response
from proxy.routes.base import Route
from proxy.turn.prompt_fields import (
    Append,
    Prompt,
    extend,
    in_vocabulary,
    needs_ids,
    refuse_media,
    take_append,
    take_prompt,
)
from proxy.turn.required_prefix import FIELD, keep_prefix
from proxy.turn.services import Services
from proxy.types import Fields, Headers

_PATH = "/tokenize"


class Tokenize(Route):
    """Tokenises messages; appends messages to ids; renders a history around ids."""

    path = _PATH
    summary = "Tokenise; append to ids; keep a prefix of ids"

    async def answer(self, incoming: Request, gateway: Services) -> Response:
        """`{"tokens", "count", "max_model_len"}`, and `appended` where messages were appended."""
        fields = parse(incoming.body)
        if given(fields, FIELD) is not None:
            return await gateway.fleet.on_replica(
                lambda replica: _keep_prefix(fields, incoming.headers, replica, gateway)
            )
        prompt = take_prompt(fields)
        if prompt is None and given(fields, "append_messages") is None:
            call = Request("POST", _PATH, incoming.headers, incoming.body, repeatable=True)
            return await gateway.fleet.send(call)
        if prompt is None:
            raise needs_ids(fields)
        refuse_media(fields, "append_messages")
        append = take_append(fields)
        if append is None:
            raise BadRequest("`append_messages` is required beside ids", param="append_messages")
        return await gateway.fleet.on_replica(
            lambda replica: _append(prompt, append, fields, replica, gateway)
        )


async def _append(
    prompt: Prompt, append: Append, fields: Fields, replica: Replica, gateway: Services
) -> BytesResponse:
    """The whole next prompt, and how many ids were appended."""
    model = read(fields, "model", str)
    if model is not None and not await replica.serves(model):
        raise NotFound(f"The model `{model}` does not exist.", param="model", code="model_not_found")
    tokenizer = await replica.tokenizer()
    tokens, appended = await extend(prompt, append, replica, gateway)
    strings = read(fields, "return_token_strs", bool) or False

    def check() -> list[str] | None:
        values = in_vocabulary(tokens, tokenizer, prompt.field)
        return tokenizer.token_strings(values) if strings else None

    token_strs = await gateway.in_thread(check)
    known = replica.capabilities
    return _json(
        {
            "count": prompt.count + appended,
            "max_model_len": known.model.max_model_len if known and known.model else None,
            "tokens": msgspec.Raw(tokens),
            "token_strs": token_strs,
            "appended": appended,
        }
    )


async def _keep_prefix(fields: Fields, headers: Headers, replica: Replica, gateway: Services) -> Response:
    """The template's rendering of a history, with the model's own tokens up to the last assistant turn."""
    kept = await keep_prefix(fields, headers, replica, gateway)
    if isinstance(kept, BytesResponse):
        return kept
    token_strs = None
    if read(fields, "return_token_strs", bool):
        tokenizer = await replica.tokenizer()
        token_strs = await gateway.in_thread(lambda: tokenizer.token_strings(kept.tokens))
    return _json(
        {**kept.rendered, "tokens": kept.tokens, "count": len(kept.tokens), "token_strs": token_strs}
    )


def _json(value: object) -> BytesResponse:
    return BytesResponse(200, list(JSON_HEADERS), msgspec.json.encode(value))
