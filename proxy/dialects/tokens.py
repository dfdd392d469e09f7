"""`POST /v1/chat/completions/tokens`: a chat completion whose prompt is exact ids."""

from typing import Any, ClassVar

import msgspec

from proxy.dialects.base import Dialect, Gateway, Incoming
from proxy.dialects.headers import said
from proxy.dialects.prompt import Append, Prompt, extend, needs_ids, refuse_media, take_append, take_prompt
from proxy.engine.protocol import Answer, Call
from proxy.engine.token_in import CHAT_PATH, TokenRequest
from proxy.errors import BadRequest
from proxy.fields import given, join, parse, read
from proxy.fleet.replica import Replica
from proxy.types import Fields, Headers

_TRUE = msgspec.Raw(b"true")
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


class Tokens(Dialect):
    """Takes ids, or messages for a first turn; always answers with ids unless told not to."""

    path = "/v1/chat/completions/tokens"
    summary = "Chat completion on exact prompt ids"
    openapi: ClassVar[dict[str, Any]] = {
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": {
                        "type": "object",
                        "description": "Every field of a vLLM chat completion, and these.",
                        "properties": {
                            "prompt_ids": {**_IDS, "description": "The exact prompt."},
                            "tokens": {**_IDS, "description": "Another name for `prompt_ids`."},
                            "prompt_token_ids": {**_IDS, "description": "Another name for `prompt_ids`."},
                            "append_messages": {
                                "type": "array",
                                "items": {"type": "object"},
                                "description": "Messages to put behind `prompt_ids`.",
                            },
                            "messages": {
                                "type": "array",
                                "items": {"type": "object"},
                                "description": "The first turn, or the history that led to `prompt_ids`.",
                            },
                            "return_token_ids": {"type": "boolean", "default": True},
                        },
                    }
                }
            },
        }
    }

    async def answer(self, incoming: Incoming, gateway: Gateway) -> Answer:
        """A chat completion, or its stream of chunks, with `prompt_token_ids` and `choices[].token_ids`."""
        fields = parse(incoming.body)
        prompt = take_prompt(fields)
        append = take_append_or_refuse(fields, prompt)
        if given(fields, "return_token_ids") is None:
            fields["return_token_ids"] = _TRUE
        if prompt is None:
            call = Call("POST", CHAT_PATH, incoming.headers, join(fields), repeatable=True)
            return said(await gateway.fleet.send(call), source="rendered", reused=0, reason="no_ids")
        refuse_beside_ids(fields, prompt)
        return await self._complete(prompt, append, fields, incoming.headers, gateway)

    async def _complete(
        self, prompt: Prompt, append: Append | None, fields: Fields, headers: Headers, gateway: Gateway
    ) -> Answer:
        async def work(replica: Replica) -> Answer:
            token_in = replica.known().require_token_in()
            raw, appended = prompt.raw, 0
            if append is not None:
                raw, appended = await extend(prompt, append, replica, gateway)
            request = TokenRequest(raw, fields, headers, prompt.field)
            answer = await token_in.complete(replica.engine, request)
            if append is None:
                return said(answer, source="given", reused=prompt.count, appended=0, reason="ids_given")
            return said(answer, source="extended", reused=prompt.count, appended=appended)

        return await gateway.fleet.on_replica(work, token_in=True)


def take_append_or_refuse(fields: Fields, prompt: Prompt | None) -> Append | None:
    """`append_messages`, which need ids; without either there must at least be messages.

    The history keeps what was appended, because some tool parsers number calls by it.

    Raises:
        BadRequest: neither ids nor messages are given, or an append without ids.
    """
    appended = given(fields, "append_messages")
    if appended is not None:
        refuse_media(fields, "append_messages")
    append = take_append(fields)
    history = given(fields, "messages")
    if prompt is None:
        if append is not None:
            raise needs_ids(fields)
        if history is None:
            raise BadRequest("`prompt_ids` or `messages` is required", param="prompt_ids")
    elif history is None:
        fields.pop("messages", None)
    elif appended is not None and history.strip(b"[] \t\r\n"):
        whole = history.rstrip()[:-1] + b"," + appended.lstrip()[1:]
        fields["messages"] = msgspec.Raw(whole)
    return append


def refuse_beside_ids(fields: Fields, prompt: Prompt) -> None:
    """Refuse what would make an engine render messages and ignore the ids, or take other ids.

    Raises:
        BadRequest: there is such a field; `param` names it.
    """
    refuse_media(fields, "messages")
    if "prompt_token_ids" in (read(fields, "kv_transfer_params", Fields) or {}):
        raise BadRequest(
            f"give the prompt once: in `{prompt.field}` or in `kv_transfer_params`",
            param="kv_transfer_params.prompt_token_ids",
        )
    if read(fields, "echo", bool):
        raise BadRequest(f"`echo` cannot be combined with `{prompt.field}`", param="echo")
