"""`POST /v1/chat/completions/tokens`: a chat completion whose prompt is exact ids."""

from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from proxy.dialects.chat import understood, wanted_of, with_evidence
from proxy.engine.token_in import CHAT_PATH, TokenRequest
from proxy.errors import BadRequest
from proxy.fields import given, join, parse, read
from proxy.fleet.replica import Replica
from proxy.history.plan import Plan
from proxy.history.retries import Attempt
from proxy.http import Request, Response
from proxy.routes.base import Route
from proxy.turn.prompt_fields import Append, Prompt, extend, needs_ids, refuse_media, take_append, take_prompt
from proxy.turn.prompt_headers import placed, said
from proxy.turn.serve import Conclusion, recorded_answer
from proxy.turn.services import Services
from proxy.turn.session_fields import apply_session, session_of
from proxy.types import Fields

_TRUE = msgspec.Raw(b"true")
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


class Tokens(Route):
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

    async def answer(self, incoming: Request, gateway: Services) -> Response:
        """A chat completion, or its stream of chunks, with `prompt_token_ids` and `choices[].token_ids`."""
        fields = parse(incoming.body)
        prompt = take_prompt(fields)
        new = given(fields, "append_messages")
        append = take_append_or_refuse(fields, prompt)
        if given(fields, "return_token_ids") is None:
            fields["return_token_ids"] = _TRUE
        if prompt is not None:
            refuse_beside_ids(fields, prompt)
        session = session_of(incoming.headers)
        if session is not None:
            return await _Recorded(prompt, append, new, fields, session, incoming, gateway).answer()
        if prompt is None:
            call = Request("POST", CHAT_PATH, incoming.headers, join(fields), repeatable=True)
            return said(await gateway.fleet.send(call), source="rendered", reused=0, reason="no_ids")

        async def work(replica: Replica) -> Response:
            raw, appended = await _whole_prompt(prompt, append, replica, gateway)
            request = TokenRequest(raw, fields, incoming.headers, prompt.field)
            answer = await replica.known().require_token_in().complete(replica.engine, request)
            return _say(answer, prompt, append, appended)

        return await gateway.fleet.on_replica(work, token_in=True)


@dataclass
class _Recorded:
    """A request of a session: its turn is recorded behind the turn whose ids it goes on from."""

    prompt: Prompt | None
    append: Append | None
    new: bytes | None
    """The messages to append as they were spelled."""
    fields: Fields
    session: str
    incoming: Request
    gateway: Services

    async def answer(self) -> Response:
        """As without a session; a retry is answered once."""
        wanted = wanted_of(self.fields)
        await apply_session(self.fields, self.session, self.gateway)
        conclusion = Conclusion(
            self.gateway, Attempt(self.incoming.headers, self.incoming.body, self.session)
        )
        if (replay := await conclusion.begin()) is not None:
            return replay
        asking = with_evidence(self.fields, self.gateway)

        async def work(replica: Replica) -> Response:
            answer, plan = await self._ask(replica, asking)
            return await recorded_answer(answer, plan, wanted, self.gateway, conclusion)

        async with conclusion.watched():
            return await self.gateway.fleet.on_replica(work, token_in=self.prompt is not None)

    async def _ask(self, replica: Replica, asking: Fields) -> tuple[Response, Plan]:
        headers = [pair for pair in self.incoming.headers if pair[0] != b"accept-encoding"]
        asked = understood(self.fields, self.session)
        rollouts = self.gateway.rollouts
        if self.prompt is None:
            asked.special = "no_ids"
            plan = await rollouts.plan_given(asked, replica, b"", "rendered", whole=True)
            call = Request("POST", CHAT_PATH, headers, join(asking), repeatable=True)
            answer = said(await replica.engine.send(call), source="rendered", reused=0, reason="no_ids")
            return placed(answer, plan), plan
        raw, appended = await _whole_prompt(self.prompt, self.append, replica, self.gateway)
        asked.messages = self.new or b"[]"
        asked.special = "" if self.append else "ids_given"
        source = "extended" if self.append else "given"
        plan = await rollouts.plan_given(asked, replica, raw, source, whole=False)
        request = TokenRequest(raw, asking, headers, self.prompt.field)
        answer = await replica.known().require_token_in().complete(replica.engine, request)
        return placed(_say(answer, self.prompt, self.append, appended), plan), plan


async def _whole_prompt(
    prompt: Prompt, append: Append | None, replica: Replica, gateway: Services
) -> tuple[bytes, int]:
    """The prompt with what is appended, and the number of ids that are."""
    replica.known().require_token_in()
    return (prompt.raw, 0) if append is None else await extend(prompt, append, replica, gateway)


def _say(answer: Response, prompt: Prompt, append: Append | None, appended: int) -> Response:
    if append is None:
        return said(answer, source="given", reused=prompt.count, appended=0, reason="ids_given")
    return said(answer, source="extended", reused=prompt.count, appended=appended)


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
