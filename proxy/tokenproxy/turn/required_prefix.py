"""Required prefixes, NeMo-RL's contract: the model's own ids, and messages that are appended to them.

The client sends the ids in `required_prefix_token_ids`, or on an assistant message: NeMo-RL's server puts
three fields on the message of a completion, and NeMo-Gym sends the message back with them:

    {"role": "assistant", "content": "It is 4.", "prompt_token_ids": [1, 5, 9],
     "generation_token_ids": [57, 2], "generation_log_probs": [-0.1, -0.02]}

The next prompt then begins with `[1, 5, 9, 57, 2]`.
"""

import math

import msgspec
from msgspec.structs import replace

from chat_tokenizer import InvalidIds, ids
from tokenproxy.base.errors import BadRequest
from tokenproxy.base.fields import NULL, flag, is_null, raw, raw_value, read
from tokenproxy.base.request import GivenIds
from tokenproxy.base.types import Fields
from tokenproxy.record.completion import SampledChoice
from tokenproxy.turn.lenient import REFUSALS

FIELD = "required_prefix_token_ids"
PROMPT, GENERATION, LOGPROBS = "prompt_token_ids", "generation_token_ids", "generation_log_probs"
MESSAGE_FIELDS = (PROMPT, GENERATION, LOGPROBS)
_EXPERTS = "routed_experts"
"""Megabytes that NeMo-Gym sends back next to the ids; the engine gets them as little as these."""
_IN_IDS, _IN_LOGPROBS = b'_token_ids"', b'"generation_log_probs"'
"""What messages with such fields hold."""

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


def take_prefix(fields: Fields) -> tuple[GivenIds, bytes] | None:
    """Remove required prefixes from a request's fields and messages; return the one that counts.

    That is `required_prefix_token_ids`, which ends with the last assistant message, else the ids of the last
    assistant message that holds some.

    Returns:
        the ids, and a JSON array of the messages after the one that they end with; None if there are none.

    Raises:
        BadRequest: a message holds ids or log-probabilities of a wrong type, or a part of them; or there are
            ids, and no message before or after their end.
    """
    prefix, end, found = None, -1, False
    data = bytes(fields.get("messages", b""))
    try:
        messages = _decode_messages(data) if _IN_IDS in data or _IN_LOGPROBS in data else []
    except REFUSALS:
        messages = []  # the engine refuses them with its own message
    for index, message in enumerate(messages):
        if _is_turn(message) and any(name in message for name in MESSAGE_FIELDS):
            found = True
            taken = {name: message.pop(name) for name in MESSAGE_FIELDS if name in message}
            message.pop(_EXPERTS, None)
            if not all(map(is_null, taken.values())):
                prefix, end = _prefix_of(taken, index), index
    if found:
        fields["messages"] = raw(messages)
    required = raw_value(fields, FIELD)
    fields.pop(FIELD, None)
    if required is not None:
        prefix, messages = _given(FIELD, required), read(fields, "messages", list[Fields]) or []
        end = max((index for index, message in enumerate(messages) if _is_turn(message)), default=-1)
    if prefix is None:
        return None
    first = end + 1
    if not first or not messages[first:]:
        raise BadRequest(
            f"`messages` must hold the assistant turn that `{prefix.field}` ends with, and go on after it",
            param="messages",
        )
    return replace(prefix, first=first), raw(messages[first:])


def _is_turn(message: Fields) -> bool:
    return raw_value(message, "role") == b'"assistant"'


def _given(field: str, data: bytes) -> GivenIds:
    try:
        return GivenIds(field, data, ids.check(data), after="messages")
    except InvalidIds as error:
        raise BadRequest(f"`{field}` {error}", param=field) from error


def _prefix_of(taken: Fields, index: int) -> GivenIds:
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
        _given(param, value)
        parts.append(inner)
    param = f"messages[{index}].{LOGPROBS}"
    read({param: taken.get(LOGPROBS, msgspec.Raw(NULL))}, param, list[float | None])  # for its error
    return _given(f"messages[{index}].{PROMPT}", b"[%b]" % b",".join(parts))
