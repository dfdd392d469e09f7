"""`POST /v1/chat/completions`: plain OpenAI, kept exact with no help from the client."""

from typing import Any, ClassVar

from proxy.dialects.base import SessionFields, apply_session, chat_request, visible_of
from proxy.engine.token_in import CHAT_PATH
from proxy.fields import parse, raw_value
from proxy.http import Request
from proxy.turn.request import ChatRequest
from proxy.turn.required_prefix import FIELD as PREFIX_FIELD


class ChatDialect:
    """A chat completion or its stream of chunks, with ids and logprobs if the client requests them."""

    path: ClassVar[str] = CHAT_PATH
    summary: ClassVar[str] = "Chat completion, token-exact over turns"
    openapi: ClassVar[dict[str, Any]] = {}

    def parse(self, request: Request, session: SessionFields | None, *, record: bool) -> ChatRequest:
        """See `Dialect.parse`."""
        fields = parse(request.body)
        visible = visible_of(fields)
        apply_session(fields, session)
        prefix = raw_value(fields, PREFIX_FIELD)
        fields.pop(PREFIX_FIELD, None)
        return chat_request(request, fields, session, visible, required_prefix=prefix)
