"""The fields that carry an exact prompt, shared by the routes that take one."""

from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.engine.media import media_kind
from proxy.errors import BadRequest, Unsupported
from proxy.fields import given, read, read_messages
from proxy.fleet.replica import Replica
from proxy.turn.services import Services
from proxy.types import Fields
from tokenization import ChatTokenizer, InvalidIds, TemplateUnsupported, TokenizationError, ids

ALIASES = ("prompt_ids", "tokens", "prompt_token_ids")
_OURS = frozenset(
    {
        *("messages", "conversation", "new_messages", "prompt_ids", "history", "tools", "chat_template"),
        *("add_generation_prompt", "continue_final_message", "finish_reason", "stop_reason"),
        *("self", "last_id", "unfinished"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)
"""Arguments of the rendering itself, which are no variables of a template."""


@dataclass(slots=True)
class Prompt:
    """Ids as a client sent them."""

    field: str
    """What the client called them."""
    raw: bytes
    """The JSON array, checked."""
    count: int


@dataclass(slots=True)
class Append:
    """Messages to put behind a prompt, and everything their rendering depends on."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    template_kwargs: dict[str, Any]
    messages_before: bytes | None
    """The history that led to the prompt, if the client gave it."""

    def history(self) -> list[dict[str, Any]] | None:
        """The history, if it ends with the turn that is appended to.

        Raises:
            BadRequest: it is no list of messages.
        """
        if self.messages_before is None:
            return None
        messages = (
            read({"messages": msgspec.Raw(self.messages_before)}, "messages", list[dict[str, Any]]) or []
        )
        return messages if messages and messages[-1].get("role") == "assistant" else None


class _Peek(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw(b"null")


def take_prompt(fields: Fields) -> Prompt | None:
    """Take the ids out of `fields`, under whichever of their names.

    Raises:
        BadRequest: they are given twice, empty, or no list of non-negative integers.
    """
    present = [name for name in ALIASES if given(fields, name) is not None]
    if len(present) > 1:
        raise BadRequest(f"give the prompt once: `{present[0]}` or `{present[1]}`", param=present[1])
    for name in ALIASES:
        if name not in present:
            fields.pop(name, None)
    if not present:
        return None
    field = present[0]
    raw = bytes(fields.pop(field))
    try:
        return Prompt(field, raw, ids.check(raw))
    except InvalidIds as error:
        raise BadRequest(f"`{field}` {error}", param=field) from error


def take_append(fields: Fields) -> Append | None:
    """Take `append_messages` out of `fields`, with copies of what else shapes the rendering.

    Raises:
        BadRequest: it holds no messages, or stands beside a field that it cannot be combined with.
    """
    messages = read_messages(fields, "append_messages")
    fields.pop("append_messages", None)
    if messages is None:
        return None
    if given(fields, "chat_template") is not None:
        raise BadRequest("`append_messages` uses the server's chat template", param="chat_template")
    if read(fields, "continue_final_message", bool):
        raise BadRequest(
            "`continue_final_message` cannot be combined with `append_messages`",
            param="continue_final_message",
        )
    add_generation_prompt = read(fields, "add_generation_prompt", bool)
    return Append(
        messages,
        read(fields, "tools", list[dict[str, Any]]),
        add_generation_prompt is not False,
        template_kwargs(fields),
        given(fields, "messages"),
    )


def template_kwargs(fields: Fields) -> dict[str, Any]:
    """What a request passes to the template, gathered as vLLM gathers it.

    Raises:
        BadRequest: one of the fields holds something else than it should.
    """
    kwargs = read(fields, "chat_template_kwargs", dict[str, Any]) or {}
    if taken := _OURS.intersection(kwargs):
        raise BadRequest(
            f"`chat_template_kwargs` cannot set {', '.join(sorted(taken))} beside `append_messages`",
            param="chat_template_kwargs",
        )
    documents = read(fields, "documents", list[dict[str, Any]])
    if documents is not None:
        kwargs["documents"] = documents
    effort = read(fields, "reasoning_effort", str)
    if effort is not None:
        kwargs.setdefault("enable_thinking", effort != "none")
        kwargs["reasoning_effort"] = effort
    return kwargs


def refuse_media(fields: Fields, name: str) -> None:
    """Refuse messages with images or other media beside ids: the engine would ignore the ids.

    Raises:
        BadRequest: there is such a part, or the field holds no list of messages.
    """
    for index, message in enumerate(read(fields, name, list[_Peek]) or []):
        if not bytes(message.content).startswith(b"["):
            continue
        if kind := media_kind(read({name: message.content}, name, list[Any])):
            raise BadRequest(
                f"message {index} of `{name}` holds a part of type {kind}: "
                "images and other media are not supported beside prompt ids",
                param=name,
            )


async def extend(prompt: Prompt, append: Append, replica: Replica, gateway: Services) -> tuple[bytes, int]:
    """The next prompt as a JSON array, and how many ids were put behind `prompt`.

    Raises:
        BadRequest: the template refuses the messages.
        Unsupported: there is no tokenizer here, or no exact append for this template.
    """
    tokenizer = await replica.tokenizer()

    def encode() -> list[int]:
        following = tokenizer.continuation(
            ids.last(prompt.raw),
            append.messages,
            history=append.history(),
            tools=append.tools,
            add_generation_prompt=append.add_generation_prompt,
            **append.template_kwargs,
        )
        return [*following.close_ids, *following.suffix_ids]

    try:
        added = await gateway.in_thread(encode)
    except TemplateUnsupported as error:
        raise Unsupported(
            f"cannot append exactly: {error}", param="append_messages", code="template_unsupported"
        ) from error
    except InvalidIds as error:
        raise BadRequest(f"`{prompt.field}` {error}", param=prompt.field) from error
    except TokenizationError as error:
        raise BadRequest(f"`append_messages`: {error}", param="append_messages") from error
    return ids.join(prompt.raw, added), len(added)


def needs_ids(fields: Fields) -> BadRequest:
    """The error for a request that should carry ids and carries none."""
    return BadRequest("`append_messages` needs the ids it is put behind, in `prompt_ids`", param="prompt_ids")


def in_vocabulary(raw: bytes, tokenizer: ChatTokenizer, field: str) -> list[int]:
    """Checked ids as integers; BadRequest, naming `field`, if one of them does not exist."""
    try:
        values = msgspec.json.decode(raw, type=list[int])
    except msgspec.DecodeError as error:
        raise BadRequest(f"`{field}` holds an id that is out of vocabulary", param=field) from error
    if (largest := max(values)) >= tokenizer.vocab_size:
        raise BadRequest(f"Token id {largest} is out of vocabulary", param=field)
    return values
