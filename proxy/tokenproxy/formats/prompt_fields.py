"""The request fields that hold exact ids, shared by the routes that accept them."""

from typing import Any

import msgspec

from chat_tokenizer import InvalidIds, ids
from chat_tokenizer.messages import image_url
from tokenproxy.base.errors import BadRequest
from tokenproxy.base.fields import raw_value, read
from tokenproxy.base.request import GivenIds, media_kind
from tokenproxy.base.types import Fields

ALIASES = ("prompt_ids", "tokens", "prompt_token_ids")
"""Names under which clients send the exact prompt."""


class _Content(msgspec.Struct):
    """The part of a message that is searched for media."""

    content: msgspec.Raw = msgspec.Raw(b"null")


def take_prompt(fields: Fields) -> GivenIds | None:
    """Remove the ids from `fields`, under any of their names, and return them.

    Raises:
        BadRequest: they are given twice, are empty, or are not a list of non-negative integers.
    """
    present = [name for name in ALIASES if raw_value(fields, name) is not None]
    if len(present) > 1:
        raise BadRequest(f"give the prompt once: `{present[0]}` or `{present[1]}`", param=present[1])
    for name in ALIASES:
        if name not in present:
            fields.pop(name, None)
    if not present:
        return None
    field = present[0]
    return checked_ids(field, bytes(fields.pop(field)))


def checked_ids(field: str, raw: bytes, position: int | None = None) -> GivenIds:
    """Prompt ids in a JSON value.

    Args:
        position: of the prompt in the list of prompts that the field holds.

    Raises:
        BadRequest: it is not a list of integers from 0 to 2**31 - 1, or is empty.
    """
    try:
        given = GivenIds(field, *ids.check_whole(raw))
        ids.check_size(given.raw)
        return given
    except InvalidIds as error:
        name = field if position is None else f"{field}[{position}]"
        raise BadRequest(f"`{name}` {error}", param=field) from error


def take_append(fields: Fields, prompt: GivenIds | None) -> bytes | None:
    """Remove `append_messages` from `fields` and return it: a JSON array of messages, or None.

    Raises:
        BadRequest: it holds no messages, comes without ids, or with a field that it cannot be combined with.
    """
    appended = raw_value(fields, "append_messages")
    if appended is None:
        fields.pop("append_messages", None)
        return None
    if not read(fields, "append_messages", list[_Content]):
        raise BadRequest.of("append_messages", "must not be empty: send at least one message")
    fields.pop("append_messages")
    if prompt is None:
        raise needs_ids()
    check_rendering(fields, "append_messages")
    return appended


def check_rendering(fields: Fields, param: str) -> None:
    """Check the fields with which the chat template renders messages after ids.

    Args:
        param: the client's name of what asks for it, for error messages.

    Raises:
        BadRequest: one of them cannot be combined with that, or has a wrong type.
    """
    if raw_value(fields, "chat_template") is not None:
        raise BadRequest(f"`{param}` uses the server's chat template", param="chat_template")
    if read(fields, "continue_final_message", bool):
        raise BadRequest.of("continue_final_message", f"cannot be combined with `{param}`")
    # read here for their errors: on the chat route the engine refuses what cannot be read
    read(fields, "tools", list[dict[str, Any]])
    template_kwargs(fields)


def join_messages(history: bytes | None, appended: bytes) -> bytes:
    """Two JSON arrays of messages as one; empty if there is no history."""
    if history is None or not history.strip(b"[] \t\r\n"):
        return b""
    return history.rstrip()[:-1] + b"," + appended.lstrip()[1:]


def template_kwargs(fields: Fields) -> dict[str, Any]:
    """The arguments that a request passes to the template, collected as vLLM collects them.

    Raises:
        BadRequest: one of the fields has a wrong type.
    """
    kwargs = read(fields, "chat_template_kwargs", dict[str, Any]) or {}
    # vLLM overrides these two with the fields of the same name, which always have a value
    kwargs.pop("add_generation_prompt", None)
    kwargs.pop("continue_final_message", None)
    documents = read(fields, "documents", list[dict[str, Any]])
    if documents is not None:
        kwargs["documents"] = documents
    effort = read(fields, "reasoning_effort", str)
    if effort is not None:
        kwargs.setdefault("enable_thinking", effort != "none")
        kwargs["reasoning_effort"] = effort
    return kwargs


def media_fields(**fields: bytes | None) -> tuple[str, ...]:
    """The fields, each a JSON array of messages next to ids, that hold images.

    Raises:
        BadRequest: as `_has_images`.
    """
    present = {name: msgspec.Raw(value) for name, value in fields.items() if value}
    return tuple(name for name in present if _has_images(present, name))


def _has_images(fields: Fields, name: str) -> bool:
    """Whether messages next to ids hold images. Their texts, which may be megabytes, are not parsed.

    Raises:
        BadRequest: there is a part with other media, or the field is not a list of messages.
    """
    found = False
    messages = read(fields, name, list[_Content]) or []
    for index, message in enumerate(messages):
        if bytes(memoryview(message.content)[:1]) != b"[":
            continue
        for part in read({name: message.content}, name, list[Any]) or []:
            kind = media_kind([part])
            if kind is None:
                continue
            if not isinstance(part, dict) or image_url(part) is None:
                raise BadRequest(
                    f"message {index} of `{name}` holds a part of type {kind}: of all media, only images by "
                    "their URL are supported together with prompt ids",
                    param=name,
                )
            found = True
    return found


def take_images(fields: Fields) -> tuple[str, ...] | None:
    """Remove `images` from `fields` and return it: base64 or URLs; None if there is none.

    Raises:
        BadRequest: it is not a list of strings.
    """
    images = read(fields, "images", list[str])
    fields.pop("images", None)
    return None if images is None else tuple(images)


def needs_ids() -> BadRequest:
    """The error for a request without the ids that it needs."""
    return BadRequest(
        "`append_messages` needs the ids it is appended to, in `prompt_ids`", param="prompt_ids"
    )
