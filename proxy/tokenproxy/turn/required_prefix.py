"""Required prefixes, NeMo-RL's contract: a rendered history around the model's own ids.

The client sends the ids in `required_prefix_token_ids`, or on an assistant message: NeMo-RL's server puts
three fields on the message of a completion, and NeMo-Gym sends the message back with them:

    {"role": "assistant", "content": "It is 4.", "prompt_token_ids": [1, 5, 9],
     "generation_token_ids": [57, 2], "generation_log_probs": [-0.1, -0.02]}

The next prompt then begins with `[1, 5, 9, 57, 2]`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from chat_tokenizer import (
    ChatTokenizer,
    InvalidIds,
    PrefixMismatch,
    TemplateUnsupported,
    ids,
    replace_prefix_tokens,
)
from tokenproxy.base.errors import BadRequest, EngineBroken, Unsupported
from tokenproxy.base.fields import NULL, flag, is_null, join, raw, raw_value, read, read_messages
from tokenproxy.base.http import JSON_HEADERS, BytesResponse, EngineRefused, Request
from tokenproxy.base.request import RequiredPrefix
from tokenproxy.base.types import Fields, Headers
from tokenproxy.engine.protocol import fetch
from tokenproxy.fleet.model import FleetModel
from tokenproxy.record.completion import SampledChoice
from tokenproxy.turn.lenient import REFUSALS
from tokenproxy.turn.services import Services

FIELD = "required_prefix_token_ids"
PROMPT, GENERATION, LOGPROBS = "prompt_token_ids", "generation_token_ids", "generation_log_probs"
MESSAGE_FIELDS = (PROMPT, GENERATION, LOGPROBS)
_EXPERTS = "routed_experts"
"""Megabytes that NeMo-Gym sends back next to the ids; the engine gets them as little as these."""
_IN_IDS, _IN_LOGPROBS = b'_token_ids"', b'"generation_log_probs"'
"""What messages with such fields hold."""
_TOKENIZE_PATH = "/tokenize"
_RENDERING = (
    *("model", "messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt"),
    *("continue_final_message", "add_special_tokens", "mm_processor_kwargs", "return_token_strs"),
)
"""The fields of a chat request that change the rendering."""

_decode_messages = msgspec.json.Decoder(list[Fields]).decode


def asks_on_messages(fields: Fields) -> bool:
    """Whether a request with `logprobs` asks for ids on messages, as NeMo-RL's server reads it."""
    return flag(fields, "return_tokens_as_token_ids") and raw_value(fields, "top_logprobs") is not None


def with_ids(message: Fields, prompt: bytes, sampled: SampledChoice) -> Fields:
    """The message of a choice with its ids and log-probabilities.

    Without one finite log-probability for each id it stays as it is: a client must not train on a part.
    """
    ids, logprobs = list(sampled.ids or ()), list(sampled.logprobs or ())
    if sampled.unreadable or sampled.ids is None or sampled.logprobs is None or len(ids) != len(logprobs):
        return message
    if not math.isfinite(sum(logprobs)):
        return message
    return {**message, PROMPT: msgspec.Raw(prompt), GENERATION: raw(ids), LOGPROBS: raw(logprobs)}


def take_prefix(fields: Fields) -> RequiredPrefix | None:
    """Remove required prefixes from a request's fields and messages; return the one that counts.

    That is `required_prefix_token_ids`, else the ids of the last assistant message that holds some.

    Raises:
        BadRequest: a message holds ids or log-probabilities of a wrong type, or a part of them.
    """
    prefix, found = None, False
    data = bytes(fields.get("messages", b""))
    try:
        messages = _decode_messages(data) if _IN_IDS in data or _IN_LOGPROBS in data else []
    except REFUSALS:
        messages = []  # the engine refuses them with its own message
    for index, message in enumerate(messages):
        if raw_value(message, "role") == b'"assistant"' and any(name in message for name in MESSAGE_FIELDS):
            found = True
            taken = {name: message.pop(name) for name in MESSAGE_FIELDS if name in message}
            message.pop(_EXPERTS, None)
            if not all(map(is_null, taken.values())):
                prefix = _prefix_of(taken, index)
    if found:
        fields["messages"] = raw(messages)
    required = raw_value(fields, FIELD)
    fields.pop(FIELD, None)
    return prefix if required is None else RequiredPrefix(FIELD, required)


def _prefix_of(taken: Fields, index: int) -> RequiredPrefix:
    """The ids that were on a message. Raises BadRequest."""
    parts: list[bytes] = []
    for name in (PROMPT, GENERATION):
        param, value = f"messages[{index}].{name}", raw_value(taken, name)
        if value is None:
            raise BadRequest(
                f"`{param}` is missing: `{PROMPT}` and `{GENERATION}` are one turn only together", param=param
            )
        inner = value.strip()[1:-1].strip()
        if name == GENERATION and not inner and value.lstrip().startswith(b"["):
            continue
        try:
            ids.check(value)
        except InvalidIds as error:
            raise BadRequest(f"`{param}` {error}", param=param) from error
        parts.append(inner)
    param = f"messages[{index}].{LOGPROBS}"
    read({param: taken.get(LOGPROBS, msgspec.Raw(NULL))}, param, list[float | None])  # for its error
    return RequiredPrefix(f"messages[{index}].{PROMPT}", b"[%b]" % b",".join(parts), index)


@dataclass(frozen=True, slots=True)
class RenderedPrefix:
    """A rendering that begins with the required ids."""

    prompt: bytes
    """The whole prompt as a JSON array of ids."""
    prefix: int
    """Number of its ids that are the required ones."""
    rendered: dict[str, Any]
    """The engine's own response to `/tokenize`."""


async def render_with_prefix(
    prefix: RequiredPrefix,
    fields: Mapping[str, msgspec.Raw],
    headers: Headers,
    model: FleetModel,
    services: Services,
) -> RenderedPrefix:
    """The template's rendering of a history, with the model's own ids up to the end of the prefix.

    Args:
        fields: of a request with messages.
        model: the model of the fleet.

    Raises:
        BadRequest: the ids or messages are wrong, or do not belong together.
        Unsupported: the rendering has no position at which to join the ids.
        EngineRefused: the engine refuses the messages.
    """
    rendering = {name: fields[name] for name in _RENDERING if name in fields}
    try:
        ids.check(prefix.raw)
    except InvalidIds as error:
        raise BadRequest(f"`{prefix.field}` {error}", param=prefix.field) from error
    messages = read_messages(rendering, "messages")
    if messages is None:
        raise BadRequest(f"`messages` is required together with `{prefix.field}`", param="messages")
    turns = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    if not turns:
        raise BadRequest(
            f"`{prefix.field}` ends with an assistant turn, and `messages` has none", param="messages"
        )
    end = turns[-1] if prefix.end is None else prefix.end
    whole = await _render(rendering, headers, services)
    earlier = {
        **rendering,
        "messages": raw(messages[: end + 1]),
        "add_generation_prompt": msgspec.Raw(b"false"),
    }
    before = await _render(earlier, headers, services)
    tokenizer = model.require_tokenizer()

    def splice() -> tuple[bytes, int]:
        required = in_vocabulary(prefix.raw, tokenizer, prefix.field)
        tokens = replace_prefix_tokens(tokenizer, required, before["tokens"], whole["tokens"])
        return ids.dump(tokens), len(required)

    try:
        prompt, count = await services.encoders.run(splice)
    except PrefixMismatch as error:
        raise BadRequest(f"`{prefix.field}`: {error}", param=prefix.field, code="prefix_mismatch") from error
    except TemplateUnsupported as error:
        raise Unsupported(
            f"cannot keep the prefix: {error}", param=prefix.field, code="template_unsupported"
        ) from error
    return RenderedPrefix(prompt, count, whole)


def in_vocabulary(raw: bytes, tokenizer: ChatTokenizer, field: str) -> list[int]:
    """Checked ids as integers; BadRequest, naming `field`, if one of them does not exist."""
    try:
        values = msgspec.json.decode(raw, type=list[int])
    except msgspec.DecodeError as error:
        raise BadRequest(f"`{field}` holds an id that is out of vocabulary", param=field) from error
    if (largest := max(values)) >= tokenizer.vocab_size:
        raise BadRequest(f"Token id {largest} is out of vocabulary", param=field)
    return values


async def _render(fields: Fields, headers: Headers, services: Services) -> dict[str, Any]:
    """An engine's rendering of messages. Raises EngineRefused, EngineBroken, and as `Fleet.ask`."""
    readable = [pair for pair in headers if pair[0] != b"accept-encoding"]
    request = Request("POST", _TOKENIZE_PATH, readable, join(fields), repeatable=True)
    status, body = await services.fleet.ask(lambda replica: fetch(replica.engine, request))
    if status != 200:
        raise EngineRefused(BytesResponse(status, list(JSON_HEADERS), body))
    try:
        rendered = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineBroken(f"{_TOKENIZE_PATH} returned a body that is not a JSON object") from error
    if not isinstance(rendered.get("tokens"), list):
        raise EngineBroken(f"{_TOKENIZE_PATH} returned no tokens")
    return rendered
