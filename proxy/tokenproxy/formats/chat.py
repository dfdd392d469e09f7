"""Chat completions: `POST /v1/chat/completions`, and `/tokens` below it, whose prompt is exact ids."""

from typing import Any

import msgspec

from tokenproxy.base.errors import BadRequest
from tokenproxy.base.fields import parse, raw_value, read
from tokenproxy.base.http import Request
from tokenproxy.base.request import ChatRequest, GivenIds
from tokenproxy.base.types import Fields
from tokenproxy.engine.token_in import CHAT_PATH
from tokenproxy.formats.base import (
    IDS,
    Format,
    NamedSession,
    apply_session,
    chat_request,
    request_body,
    visible_of,
)
from tokenproxy.formats.prompt_fields import (
    check_rendering,
    join_messages,
    media_fields,
    take_append,
    take_images,
    take_prompt,
)
from tokenproxy.turn.required_prefix import take_prefix

_TRUE = msgspec.Raw(b"true")
_MESSAGES = {"type": "array", "items": {"type": "object"}}


class ChatFormat(Format):
    """A chat completion or its stream of chunks, with ids and logprobs if the client requests them."""

    path = CHAT_PATH
    summary = "Chat completion, token-exact over turns"

    def parse(self, request: Request, session: NamedSession | None) -> ChatRequest:
        """See `Format.parse`."""
        fields = parse(request.body)
        visible = visible_of(fields)
        apply_session(fields, session)
        return chat_request(request, fields, session, visible, **prefix_fields(fields))


def prefix_fields(fields: Fields) -> dict[str, Any]:
    """The fields of a `ChatRequest` whose prompt begins with ids of its client, taken from its `fields`.

    Empty if there are none.

    Raises:
        BadRequest: as `take_prefix`, `check_rendering` and `_refuse_next_to_ids`.
    """
    found = take_prefix(fields)
    if found is None:
        return {}
    given, append = found
    _refuse_next_to_ids(fields, given)
    check_rendering(fields, given.field)
    media = media_fields(messages=raw_value(fields, "messages"), append_messages=append)
    return {"given": given, "append": append, "media": media}


class TokensFormat(Format):
    """Accepts ids, or messages for a first turn; the response holds ids unless the request disables them."""

    path = "/v1/chat/completions/tokens"
    summary = "Chat completion on exact prompt ids"
    openapi = request_body(
        "The fields of a vLLM chat completion, and these.",
        {
            "prompt_ids": {**IDS, "description": "The exact prompt."},
            "tokens": {**IDS, "description": "Another name for `prompt_ids`."},
            "prompt_token_ids": {**IDS, "description": "Another name for `prompt_ids`."},
            "append_messages": {**_MESSAGES, "description": "Messages to append to `prompt_ids`."},
            "images": {
                "type": "array",
                "items": {"type": "string"},
                "description": "The images of `prompt_ids`: data URLs or base64, in order.",
            },
            "messages": {
                **_MESSAGES,
                "description": "The first turn, or the conversation that `prompt_ids` hold.",
            },
            "return_token_ids": {"type": "boolean", "default": True},
        },
    )

    def parse(self, request: Request, session: NamedSession | None) -> ChatRequest:
        """See `Format.parse`."""
        fields = parse(request.body)
        if raw_value(fields, "return_token_ids") is None:
            fields["return_token_ids"] = _TRUE
        visible = visible_of(fields)
        apply_session(fields, session)
        given_ids = take_prompt(fields)
        append = take_append(fields, given_ids)
        messages = raw_value(fields, "messages")
        if given_ids is None and messages is None:
            raise BadRequest.of("prompt_ids", "or `messages` is required")
        images = take_images(fields)
        if images and given_ids is None:
            raise BadRequest("`images` are those of `prompt_ids`, which are missing", param="prompt_ids")
        media: tuple[str, ...] = ()
        if given_ids is not None:
            _refuse_next_to_ids(fields, given_ids)
            media = media_fields(messages=messages, append_messages=append)
            if messages is None:
                fields.pop("messages", None)
        if append is not None and (whole := join_messages(messages, append)):
            # parsers get the whole conversation, because some number tool calls by it
            messages = whole
            fields["messages"] = msgspec.Raw(whole)
        elif append is not None:
            messages = None
        return chat_request(
            request,
            fields,
            session,
            visible,
            messages=messages or b"",
            given=given_ids,
            append=append,
            images=images,
            media=media,
            token_route=True,
        )


def _refuse_next_to_ids(fields: Fields, prompt: GivenIds) -> None:
    """Refuse fields that make an engine render messages and ignore the ids, or use other ids.

    Raises:
        BadRequest: there is such a field; `param` names it.
    """
    if "prompt_token_ids" in (read(fields, "kv_transfer_params", Fields) or {}):
        raise BadRequest(
            f"give the prompt once: in `{prompt.field}` or in `kv_transfer_params`",
            param="kv_transfer_params.prompt_token_ids",
        )
    if read(fields, "echo", bool):
        raise BadRequest.of("echo", f"cannot be combined with `{prompt.field}`")
