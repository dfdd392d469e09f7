"""The engine as renderer: the ids of conversations, from the route that gives those of its chat completions.

vLLM's `/tokenize` renders gpt-oss in another way than its chat route up to 0.32, and its render route, which
also makes a parser for each request, is on only with --enable-scale-out. So each route is compared with the
prompts that chat completions consumed; last comes the chat route itself, which samples one id for each.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from chat_tokenizer import InvalidMessages
from chat_tokenizer.renderer import RenderOptions
from tokenproxy.base.errors import EngineBroken, Unsupported
from tokenproxy.base.http import Request
from tokenproxy.engine.protocol import Engine, error_text, examine, fetch
from tokenproxy.engine.token_in import CHAT_PATH, RENDER_PATH, json_request

_TOOL_CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
_TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
_IN_PARTS = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]


def _message(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


_QUESTION, _ANSWER = _message("user", "What is 2 + 2?"), _message("assistant", "It is 4.")
_CALL = _message("assistant", "", tool_calls=[_TOOL_CALL])
_RESULT = _message("tool", "4", tool_call_id="call00001")
_SYSTEM, _DEVELOPER = _message("system", "Be brief."), _message("developer", "Be brief.")
RenderInput = tuple[Sequence[Mapping[str, Any]], RenderOptions]
_PLAIN = RenderOptions()
CONVERSATIONS: tuple[RenderInput, ...] = (
    ([_QUESTION], _PLAIN),
    ([_message("user", "What is 2 + 2?\n"), _ANSWER, _message("user", " Grüße,  in words: 四?")], _PLAIN),
    ([_QUESTION, _CALL, _RESULT], _PLAIN),
    # the tool lacks a description, which engines fill in
    ([_QUESTION], RenderOptions([_TOOL])),
    # content as text or as parts
    ([_message("user", _IN_PARTS)], _PLAIN),
    ([_message("system", _IN_PARTS), _QUESTION], _PLAIN),
    # messages that engines may merge into the first
    ([_DEVELOPER, _QUESTION], _PLAIN),
    ([_SYSTEM, _QUESTION, _ANSWER, _message("developer", _IN_PARTS), _QUESTION], _PLAIN),
    ([_QUESTION, _ANSWER, _SYSTEM, _QUESTION], _PLAIN),
)
"""Rendered by the engine, and compared with a tokenizer. One that the engine refuses is skipped."""
CONSUMED: tuple[RenderInput, ...] = (
    CONVERSATIONS[1],
    ([_QUESTION, _CALL, _RESULT], _PLAIN),
    ([_SYSTEM, _QUESTION, _CALL, _RESULT, _ANSWER, _QUESTION], _PLAIN),
)
"""Completed by the engine, to compare its renderings with the prompts that it consumes."""
_REFUSALS = frozenset({400, 422})


class _Rendered(msgspec.Struct):
    tokens: list[int] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


@dataclass(frozen=True, slots=True)
class RenderRoute:
    """A route of vLLM that returns the ids of a conversation."""

    path: str

    async def ids(self, engine: Engine, conversation: RenderInput) -> list[int]:
        """The ids to which the engine renders a conversation.

        Raises:
            InvalidMessages: the engine refuses the messages.
            Unsupported: the engine does not have the route, or it returns no ids.
            ApiError: the engine does not respond.
        """
        status, body = await examine(engine, json_request(self.path, self._body(*conversation)))
        # a renderer that fails on messages is a program that fails on them each time
        failed = status == 500 and (self.path != CHAT_PATH or await _is_healthy(engine))
        if status in _REFUSALS or failed:
            raise InvalidMessages(f"the engine refuses the messages: {error_text(body)}")
        if status == 200:
            try:
                rendered = msgspec.json.decode(body, type=_Rendered)
            except (msgspec.DecodeError, UnicodeDecodeError):
                rendered = _Rendered()
            ids = rendered.tokens or rendered.token_ids or rendered.prompt_token_ids
            if ids:
                return ids
        if status >= 500:
            raise EngineBroken(f"{engine.name} returned status {status} for {self.path}")
        raise Unsupported(f"{engine.name} returned status {status} for {self.path}, and no ids")

    def _body(self, messages: Sequence[Mapping[str, Any]], options: RenderOptions) -> dict[str, Any]:
        """The request; a chat completion's fields that arguments of the template stand for are set too."""
        body: dict[str, Any] = {
            "messages": messages,
            "add_generation_prompt": options.add_generation_prompt,
        }
        kwargs = dict(options.kwargs)
        if options.tools:
            body["tools"] = options.tools
        if self.path == TOKENIZE.path:
            return {**body, "chat_template_kwargs": kwargs} if kwargs else body
        # vLLM sets these two from one field; with Mistral's renderer, it refuses other arguments
        if effort := kwargs.pop("reasoning_effort", None):
            body["reasoning_effort"] = effort
            if kwargs.get("enable_thinking") is (effort != "none"):
                del kwargs["enable_thinking"]
        if kwargs:
            body["chat_template_kwargs"] = kwargs
        if options.tools:
            body["tool_choice"] = "none"  # engines without a parser of tool calls refuse others
        return {**body, "max_tokens": 1, "return_token_ids": True}


RENDER, TOKENIZE, CHAT = RenderRoute(RENDER_PATH), RenderRoute("/tokenize"), RenderRoute(CHAT_PATH)


async def consumed(engine: Engine) -> list[list[int] | None]:
    """The prompts that the engine consumed for `CONSUMED`; None for one that it refuses or does not tell.

    Raises:
        ApiError: the engine does not respond.
    """
    try:
        return await rendered(engine, CHAT, CONSUMED)
    except Unsupported:
        return [None] * len(CONSUMED)


async def rendered(
    engine: Engine, route: RenderRoute, conversations: Sequence[RenderInput]
) -> list[list[int] | None]:
    """The ids of conversations; None for one that the route refuses.

    Raises:
        Unsupported: the engine does not have the route, or it returns no ids.
        ApiError: the engine does not respond.
    """

    async def of(conversation: RenderInput) -> list[int] | None:
        try:
            return await route.ids(engine, conversation)
        except InvalidMessages:
            return None

    return [await of(conversation) for conversation in conversations]


async def find_route(engine: Engine, prompts: Sequence[list[int] | None]) -> RenderRoute | None:
    """The first route that renders the prompts that the engine consumed; None if it consumed none.

    Args:
        prompts: see `consumed`.

    Raises:
        ApiError: the engine does not respond.
    """
    if not any(prompts):
        return None
    for route in (TOKENIZE, RENDER):
        try:
            if await rendered(engine, route, CONSUMED) == list(prompts):
                return route
        except Unsupported:
            continue
    return CHAT


_DATE = re.compile(r"\d{4}-\d{2}-\d{2}|\d{1,2} [A-Z][a-z]{2,8} \d{4}")


def without_dates(text: str) -> str:
    """A rendering without the date that some engines print, to compare those of different days."""
    return _DATE.sub("", text)


async def _is_healthy(engine: Engine) -> bool:
    status, _ = await fetch(engine, Request("GET", "/health"))
    return status == 200
