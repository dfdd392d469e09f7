"""`POST /tokenize`: vLLM's own contract, and two ways to continue a conversation that is already ids."""

from typing import Any

import msgspec

from proxy.dialects.base import Dialect, Gateway, Incoming
from proxy.dialects.prompt import (
    Append,
    Prompt,
    extend,
    needs_ids,
    refuse_media,
    take_append,
    take_prompt,
)
from proxy.engine.protocol import JSON_HEADERS, Answer, BytesAnswer, Call
from proxy.errors import BadRequest, EngineBroken, NotFound, Unsupported
from proxy.fields import given, join, parse, raw, read, read_messages
from proxy.fleet.replica import Replica
from proxy.types import Fields, Headers
from tokenization import (
    ChatTokenizer,
    InvalidIds,
    PrefixMismatch,
    TemplateUnsupported,
    ids,
    replace_prefix_tokens,
)

_PATH = "/tokenize"


class Tokenize(Dialect):
    """Tokenises messages; appends messages to ids; renders a history around ids."""

    path = _PATH
    summary = "Tokenise; append to ids; keep a prefix of ids"

    async def answer(self, incoming: Incoming, gateway: Gateway) -> Answer:
        """`{"tokens", "count", "max_model_len"}`, and `appended` where messages were appended."""
        fields = parse(incoming.body)
        if given(fields, "required_prefix_token_ids") is not None:
            return await gateway.fleet.on_replica(
                lambda replica: _keep_prefix(dict(fields), incoming.headers, replica, gateway)
            )
        prompt = take_prompt(fields)
        if prompt is None and given(fields, "append_messages") is None:
            call = Call("POST", _PATH, incoming.headers, incoming.body, repeatable=True)
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
    prompt: Prompt, append: Append, fields: Fields, replica: Replica, gateway: Gateway
) -> BytesAnswer:
    """The whole next prompt, and how many ids were appended."""
    model = read(fields, "model", str)
    if model is not None and not await replica.serves(model):
        raise NotFound(f"The model `{model}` does not exist.", param="model", code="model_not_found")
    tokenizer = await replica.tokenizer()
    tokens, appended = await extend(prompt, append, replica, gateway)
    strings = read(fields, "return_token_strs", bool) or False

    def check() -> list[str] | None:
        values = _in_vocabulary(tokens, tokenizer, prompt.field)
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


async def _keep_prefix(fields: Fields, headers: Headers, replica: Replica, gateway: Gateway) -> Answer:
    """The template's rendering of a history, with the model's own tokens up to the last assistant turn."""
    field = "required_prefix_token_ids"
    prefix = bytes(fields.pop(field))
    try:
        ids.check(prefix)
    except InvalidIds as error:
        raise BadRequest(f"`{field}` {error}", param=field) from error
    messages = read_messages(fields, "messages")
    if messages is None:
        raise BadRequest(f"`messages` is required beside `{field}`", param="messages")
    turns = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    if not turns:
        raise BadRequest(f"`{field}` ends with an assistant turn, and `messages` has none", param="messages")
    whole = await _rendered(fields, headers, replica)
    if isinstance(whole, BytesAnswer):
        return whole
    earlier = {
        **fields,
        "messages": raw(messages[: turns[-1] + 1]),
        "add_generation_prompt": msgspec.Raw(b"false"),
    }
    before = await _rendered(earlier, headers, replica)
    if isinstance(before, BytesAnswer):
        return before
    tokenizer = await replica.tokenizer()

    strings = read(fields, "return_token_strs", bool) or False

    def splice() -> tuple[list[int], list[str] | None]:
        values = _in_vocabulary(prefix, tokenizer, field)
        spliced = replace_prefix_tokens(tokenizer, values, before["tokens"], whole["tokens"])
        return spliced, tokenizer.token_strings(spliced) if strings else None

    try:
        tokens, token_strs = await gateway.in_thread(splice)
    except PrefixMismatch as error:
        raise BadRequest(f"`{field}`: {error}", param=field, code="prefix_mismatch") from error
    except TemplateUnsupported as error:
        raise Unsupported(
            f"cannot keep the prefix: {error}", param=field, code="template_unsupported"
        ) from error
    return _json({**whole, "tokens": tokens, "count": len(tokens), "token_strs": token_strs})


async def _rendered(fields: Fields, headers: Headers, replica: Replica) -> dict[str, Any] | BytesAnswer:
    """What the engine makes of messages, or its refusal."""
    readable = [pair for pair in headers if pair[0] != b"accept-encoding"]
    answer = await replica.engine.send(Call("POST", _PATH, readable, join(fields), repeatable=True))
    try:
        body = await answer.read()
    finally:
        await answer.aclose()
    if answer.status != 200:
        return BytesAnswer(answer.status, list(JSON_HEADERS), body)
    try:
        rendered = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineBroken(f"{_PATH} answered something that is no JSON object") from error
    if not isinstance(rendered.get("tokens"), list):
        raise EngineBroken(f"{_PATH} answered without tokens")
    return rendered


def _in_vocabulary(raw: bytes, tokenizer: ChatTokenizer, field: str) -> list[int]:
    """Checked ids as integers; BadRequest, naming `field`, if one of them does not exist."""
    try:
        values = msgspec.json.decode(raw, type=list[int])
    except msgspec.DecodeError as error:
        raise BadRequest(f"`{field}` holds an id that is out of vocabulary", param=field) from error
    if (largest := max(values)) >= tokenizer.vocab_size:
        raise BadRequest(f"Token id {largest} is out of vocabulary", param=field)
    return values


def _json(value: object) -> BytesAnswer:
    return BytesAnswer(200, list(JSON_HEADERS), msgspec.json.encode(value))
