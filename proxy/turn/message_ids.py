"""Ids on assistant messages, NeMo-RL's contract: a turn's message carries what was consumed and sampled.

NeMo-RL's server puts three fields on the message of a completion, and NeMo-Gym sends the message back with
them:

    {"role": "assistant", "content": "It is 4.", "prompt_token_ids": [1, 5, 9],
     "generation_token_ids": [57, 2], "generation_log_probs": [-0.1, -0.02]}

The next prompt then begins with `[1, 5, 9, 57, 2]`.
"""

import math
from array import array

import msgspec

from proxy.errors import BadRequest
from proxy.fields import flag, is_null, raw, raw_value
from proxy.history.completion import Completion, SampledChoice
from proxy.turn.cut import REFUSALS
from proxy.turn.request import RequiredPrefix
from proxy.types import Fields
from tokenization import InvalidIds, ids

FIELD = "required_prefix_token_ids"
PROMPT, GENERATION, LOGPROBS = "prompt_token_ids", "generation_token_ids", "generation_log_probs"
MESSAGE_FIELDS = (PROMPT, GENERATION, LOGPROBS)
_EXPERTS = "routed_experts"
"""Megabytes that NeMo-Gym sends back next to the ids; the engine gets them as little as these."""
_QUOTED = tuple(f'"{name}"'.encode() for name in MESSAGE_FIELDS)

_decode_messages = msgspec.json.Decoder(list[Fields]).decode
_decode_logprobs = msgspec.json.Decoder(list[float | None]).decode


def take_prefix(fields: Fields) -> RequiredPrefix | None:
    """Remove required prefixes from a request's fields and messages; return the one that counts.

    That is `required_prefix_token_ids`, else the ids of the last assistant message that holds some.

    Raises:
        BadRequest: a message holds ids or log-probabilities of a wrong type, or a part of them.
    """
    on_message = _take_message_ids(fields)
    required = raw_value(fields, FIELD)
    fields.pop(FIELD, None)
    return on_message if required is None else RequiredPrefix(FIELD, required)


def _take_message_ids(fields: Fields) -> RequiredPrefix | None:
    sent = fields.get("messages", msgspec.Raw(b""))
    data = bytes(sent)
    if not any(name in data for name in _QUOTED):
        return None
    try:
        messages = _decode_messages(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # the engine refuses them with its own message
    prefix, found = None, False
    for index, message in enumerate(messages):
        if raw_value(message, "role") == b'"assistant"' and any(name in message for name in MESSAGE_FIELDS):
            found = True
            prefix = _take(message, index) or prefix
    if found:
        fields["messages"] = raw(messages)
    return prefix


def _take(message: Fields, index: int) -> RequiredPrefix | None:
    """Remove the three fields from a message; its prefix, or None if they are null."""
    taken = {name: message.pop(name) for name in MESSAGE_FIELDS if name in message}
    message.pop(_EXPERTS, None)
    if all(map(is_null, taken.values())):
        return None
    where = f"messages[{index}]"
    prompt = _ids(taken, PROMPT, where)
    generation = _ids(taken, GENERATION, where, may_be_empty=True)
    try:
        _decode_logprobs(taken.get(LOGPROBS, msgspec.Raw(b"[]")))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        param = f"{where}.{LOGPROBS}"
        raise BadRequest(f"`{param}` must be a list of numbers", param=param) from error
    joined = b",".join(inner for array in (prompt, generation) if (inner := array.strip()[1:-1].strip()))
    return RequiredPrefix(f"{where}.{PROMPT}", b"[" + joined + b"]", index)


def _ids(fields: Fields, name: str, where: str, *, may_be_empty: bool = False) -> bytes:
    """The JSON array of ids in a message's field. Raises BadRequest."""
    param = f"{where}.{name}"
    value = raw_value(fields, name)
    if value is None:
        raise BadRequest(
            f"`{param}` is missing: `{PROMPT}` and `{GENERATION}` are one turn only together", param=param
        )
    if may_be_empty and not value.strip(b"[] \t\r\n") and value.count(b"[") == 1:
        return b"[]"
    try:
        ids.check(value)
    except InvalidIds as error:
        raise BadRequest(f"`{param}` {error}", param=param) from error
    return value


def asks_on_messages(fields: Fields) -> bool:
    """Whether a request with `logprobs` asks for ids on messages, as NeMo-RL's server reads it."""
    return flag(fields, "return_tokens_as_token_ids") and raw_value(fields, "top_logprobs") is not None


def add_message_ids(body: bytes, completion: Completion) -> bytes:
    """Put ids and log-probabilities on the messages of a whole completion.

    A message whose evidence is incomplete stays as it is: a client must not train on a part.

    Args:
        body: the completion as the client gets it.
        completion: what was read of the engine's response.
    """
    prompt = completion.prompt_ids
    if prompt is None or not any(map(_is_complete, completion.choices)):
        return body
    try:
        fields = msgspec.json.decode(body, type=Fields)
        choices = msgspec.json.decode(fields["choices"], type=list[Fields])
        for choice, sampled in zip(choices, completion.choices, strict=True):
            if _is_complete(sampled):
                choice["message"] = _with_ids(choice["message"], prompt, sampled)
    except (*REFUSALS, KeyError, ValueError):
        return body  # of an odd shape: evidence never fails the response
    return msgspec.json.encode({**fields, "choices": choices})


def _with_ids(message: msgspec.Raw, prompt: bytes, sampled: SampledChoice) -> msgspec.Raw:
    fields = msgspec.json.decode(message, type=Fields)
    fields[PROMPT] = msgspec.Raw(prompt)
    fields[GENERATION] = raw(list(sampled.ids or ()))
    fields[LOGPROBS] = raw(list(sampled.logprobs or ()))
    return raw(fields)


def _is_complete(choice: SampledChoice) -> bool:
    """Whether a choice holds one finite log-probability for each of its ids."""
    if choice.unreadable or choice.ids is None or choice.logprobs is None:
        return False
    stored = array("d", choice.logprobs)
    return len(choice.ids) == len(stored) and math.isfinite(sum(stored))
