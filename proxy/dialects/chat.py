"""`POST /v1/chat/completions`: plain OpenAI, kept exact with no help from the client."""

from typing import Any, ClassVar

from proxy.dialects.base import Dialect, SessionFields, apply_session, chat_request, visible_of
from proxy.dialects.prompt_fields import media_fields
from proxy.engine.token_in import CHAT_PATH
from proxy.errors import BadRequest
from proxy.fields import parse, raw_value
from proxy.http import Request
from proxy.turn.message_ids import take_prefix
from proxy.turn.request import ChatRequest, RequiredPrefix
from proxy.types import Fields


class ChatDialect(Dialect):
    """A chat completion or its stream of chunks, with ids and logprobs if the client requests them."""

    path: ClassVar[str] = CHAT_PATH
    summary: ClassVar[str] = "Chat completion, token-exact over turns"
    openapi: ClassVar[dict[str, Any]] = {}

    def parse(self, request: Request, session: SessionFields | None) -> ChatRequest:
        """See `Dialect.parse`."""
        fields = parse(request.body)
        visible = visible_of(fields)
        apply_session(fields, session)
        prefix = take_prefix(fields)
        if prefix is not None:
            _refuse_images(fields, prefix)
        return chat_request(request, fields, session, visible, required_prefix=prefix)


def _refuse_images(fields: Fields, prefix: RequiredPrefix) -> None:
    """Refuse images next to a required prefix: the rendering counts each as one id, the prefix as many."""
    if media_fields(messages=raw_value(fields, "messages")):
        raise BadRequest(
            f"`messages` with images cannot be combined with `{prefix.field}`: send `prompt_ids` and "
            "`append_messages` to /v1/chat/completions/tokens",
            param="messages",
        )
