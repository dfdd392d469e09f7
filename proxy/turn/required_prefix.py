"""`required_prefix_token_ids`, NeMo-RL's contract: a rendered history around the model's own ids."""

from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.errors import BadRequest, EngineBroken, Unsupported
from proxy.fields import join, raw, read_messages
from proxy.fleet.replica import Replica
from proxy.http import JSON_HEADERS, BytesResponse, Request
from proxy.turn.prompt_fields import in_vocabulary
from proxy.turn.services import Services
from proxy.types import Fields, Headers
from tokenization import InvalidIds, PrefixMismatch, TemplateUnsupported, ids, replace_prefix_tokens

FIELD = "required_prefix_token_ids"
_TOKENIZE_PATH = "/tokenize"
_RENDERING = (
    *("model", "messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt"),
    *("continue_final_message", "add_special_tokens", "mm_processor_kwargs", "return_token_strs"),
)
"""Fields that shape a rendering, of all that a chat request may have."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A rendering with the required prefix."""

    tokens: list[int]
    prefix: int
    """How many of them are the required ones."""
    rendered: dict[str, Any]
    """The engine's own answer to `/tokenize`."""


async def keep_prefix(
    fields: Fields, headers: Headers, replica: Replica, gateway: Services
) -> Kept | BytesResponse:
    """The template's rendering of a history, with the model's own tokens up to the last assistant turn.

    Raises:
        BadRequest: the ids or messages are wrong, or do not belong together.
        Unsupported: the template gives no place to join them.
    """
    prefix = bytes(fields[FIELD])
    fields = {name: fields[name] for name in _RENDERING if name in fields}
    try:
        ids.check(prefix)
    except InvalidIds as error:
        raise BadRequest(f"`{FIELD}` {error}", param=FIELD) from error
    messages = read_messages(fields, "messages")
    if messages is None:
        raise BadRequest(f"`messages` is required beside `{FIELD}`", param="messages")
    turns = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    if not turns:
        raise BadRequest(f"`{FIELD}` ends with an assistant turn, and `messages` has none", param="messages")
    whole = await _rendered(fields, headers, replica)
    if isinstance(whole, BytesResponse):
        return whole
    earlier = {
        **fields,
        "messages": raw(messages[: turns[-1] + 1]),
        "add_generation_prompt": msgspec.Raw(b"false"),
    }
    before = await _rendered(earlier, headers, replica)
    if isinstance(before, BytesResponse):
        return before
    tokenizer = await replica.tokenizer()

    def splice() -> tuple[list[int], int]:
        values = in_vocabulary(prefix, tokenizer, FIELD)
        return replace_prefix_tokens(tokenizer, values, before["tokens"], whole["tokens"]), len(values)

    try:
        tokens, count = await gateway.in_thread(splice)
    except PrefixMismatch as error:
        raise BadRequest(f"`{FIELD}`: {error}", param=FIELD, code="prefix_mismatch") from error
    except TemplateUnsupported as error:
        raise Unsupported(
            f"cannot keep the prefix: {error}", param=FIELD, code="template_unsupported"
        ) from error
    return Kept(tokens, count, whole)


async def _rendered(fields: Fields, headers: Headers, replica: Replica) -> dict[str, Any] | BytesResponse:
    """What the engine makes of messages, or its refusal."""
    readable = [pair for pair in headers if pair[0] != b"accept-encoding"]
    call = Request("POST", _TOKENIZE_PATH, readable, join(fields), repeatable=True)
    answer = await replica.engine.send(call)
    try:
        body = await answer.read()
    finally:
        await answer.aclose()
    if answer.status != 200:
        return BytesResponse(answer.status, list(JSON_HEADERS), body)
    try:
        rendered = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineBroken(f"{_TOKENIZE_PATH} answered something that is no JSON object") from error
    if not isinstance(rendered.get("tokens"), list):
        raise EngineBroken(f"{_TOKENIZE_PATH} answered without tokens")
    return rendered
