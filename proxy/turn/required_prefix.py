"""Required prefixes, NeMo-RL's contract: a rendered history around the model's own ids.

The client sends the ids in `required_prefix_token_ids` or on an assistant message (`proxy.turn.message_ids`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.engine.protocol import fetch
from proxy.errors import BadRequest, EngineBroken, Unsupported
from proxy.fields import join, raw, read_messages
from proxy.fleet.model import FleetModel
from proxy.http import JSON_HEADERS, BytesResponse, Request, Response
from proxy.turn.request import RequiredPrefix
from proxy.turn.services import Services
from proxy.types import Fields, Headers
from tokenization import InvalidIds, PrefixMismatch, TemplateUnsupported, ids, replace_prefix_tokens

FIELD = "required_prefix_token_ids"
_TOKENIZE_PATH = "/tokenize"
_RENDERING = (
    *("model", "messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt"),
    *("continue_final_message", "add_special_tokens", "mm_processor_kwargs", "return_token_strs"),
)
"""The fields of a chat request that change the rendering."""


class PrefixRefused(Exception):
    """The engine refused to render the messages; its response holds the reason."""

    def __init__(self, response: Response) -> None:
        super().__init__(f"the engine responded {response.status}")
        self.response = response


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
        PrefixRefused: the engine refuses the messages.
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
        required = msgspec.json.decode(prefix.raw, type=list[int])
        if (largest := max(required)) >= tokenizer.vocab_size:
            raise BadRequest(f"Token id {largest} is out of vocabulary", param=prefix.field)
        tokens = replace_prefix_tokens(tokenizer, required, before["tokens"], whole["tokens"])
        return ids.dump(tokens), len(required)

    try:
        prompt, count = await services.in_thread(splice)
    except msgspec.DecodeError as error:
        raise BadRequest(
            f"`{prefix.field}` holds an id that is out of vocabulary", param=prefix.field
        ) from error
    except PrefixMismatch as error:
        raise BadRequest(f"`{prefix.field}`: {error}", param=prefix.field, code="prefix_mismatch") from error
    except TemplateUnsupported as error:
        raise Unsupported(
            f"cannot keep the prefix: {error}", param=prefix.field, code="template_unsupported"
        ) from error
    return RenderedPrefix(prompt, count, whole)


async def _render(fields: Fields, headers: Headers, services: Services) -> dict[str, Any]:
    """An engine's rendering of messages. Raises PrefixRefused, EngineBroken, and as `Fleet.ask`."""
    readable = [pair for pair in headers if pair[0] != b"accept-encoding"]
    request = Request("POST", _TOKENIZE_PATH, readable, join(fields), repeatable=True)
    status, body = await services.fleet.ask(lambda replica: fetch(replica.engine, request))
    if status != 200:
        raise PrefixRefused(BytesResponse(status, list(JSON_HEADERS), body))
    try:
        rendered = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineBroken(f"{_TOKENIZE_PATH} returned a body that is not a JSON object") from error
    if not isinstance(rendered.get("tokens"), list):
        raise EngineBroken(f"{_TOKENIZE_PATH} returned no tokens")
    return rendered
