"""Parses a request in Anthropic's format to a chat turn."""

from typing import Any, ClassVar

import msgspec

from proxy.dialects.base import Dialect, SessionFields, apply_session, chat_request, number, visible_of
from proxy.dialects.messages.conversation import chat_messages
from proxy.dialects.messages.events import MessagesTranslation
from proxy.dialects.messages.options import chat_options
from proxy.dialects.messages.request import MessagesRequest, read_request, read_turn
from proxy.dialects.messages.template import TemplateFacts
from proxy.dialects.translated import Translation
from proxy.fields import raw
from proxy.http import Request
from proxy.turn.request import ChatRequest
from proxy.types import Fields

_LIMITS = ("max_tokens", "max_completion_tokens")


class MessagesDialect(Dialect):
    """A message of Anthropic's API, whole or as a stream of events; token-exact over turns."""

    path: ClassVar[str] = "/v1/messages"
    summary: ClassVar[str] = "Message of Anthropic's API, token-exact over turns"
    openapi: ClassVar[dict[str, Any]] = {}

    def __init__(self, template: TemplateFacts | None = None) -> None:
        """`template`: the facts about the fleet's template; None if they are not known."""
        self._template = template or TemplateFacts()

    def parse(self, request: Request, session: SessionFields | None) -> ChatRequest:
        """See `Dialect.parse`."""
        return self._chat_request(request, read_turn(request.body), session)

    def parse_count(self, request: Request, session: SessionFields | None) -> ChatRequest:
        """Parse a request to count the tokens of a prompt. Raises BadRequest."""
        return self._chat_request(request, read_request(request.body), session)

    def translation(self, request: ChatRequest) -> Translation | None:
        """See `Dialect.translation`."""
        return MessagesTranslation(request.client_model or "")

    def _chat_request(
        self, request: Request, parsed: MessagesRequest, session: SessionFields | None
    ) -> ChatRequest:
        template = self._template
        options = chat_options(parsed, template.effort_without_thinking)
        fields = {name: _as_raw(value) for name, value in options.items()}
        conversation = chat_messages(parsed.system, parsed.messages, merges_system=template.merges_system)
        fields["messages"] = raw(conversation.messages)
        visible = visible_of(fields)
        apply_session(fields, session)
        _limit_answer(fields, template.max_model_len)
        return chat_request(request, fields, session, visible, tokens=conversation.signatures)


def _as_raw(value: object) -> msgspec.Raw:
    return value if isinstance(value, msgspec.Raw) else raw(value)


def _limit_answer(fields: Fields, max_model_len: int | None) -> None:
    """Limit the answer to the model's context, because clients name the limits of other models.

    vLLM shortens an answer that does not fit after its prompt, but refuses a limit over the whole context.
    """
    if max_model_len is None:
        return
    for name in _LIMITS:
        if (number(fields, name) or 0) > max_model_len:
            fields[name] = raw(max_model_len)
