"""`POST /v1/completions`: prompts of ids or text, each the prompt of a turn."""

from typing import Any, ClassVar

from proxy.dialects.base import (
    IDS,
    Dialect,
    SessionFields,
    apply_session,
    number,
    prompt_request,
    request_body,
    routed_experts_start,
    visible_of_prompts,
)
from proxy.dialects.prompt_fields import read_prompts
from proxy.fields import flag, parse, raw_value
from proxy.history.vocabulary import Reason
from proxy.http import Request
from proxy.turn.request import EVERYTHING, ChatRequest, EngineRoute
from proxy.types import Fields

_PROMPT = {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, IDS,
                     {"type": "array", "items": IDS}]}  # fmt: skip


class CompletionsDialect(Dialect):
    """Completions of one prompt or many, with ids and log-probabilities if the client requests them."""

    path: ClassVar[str] = EngineRoute.COMPLETIONS.value
    summary: ClassVar[str] = "Completions of ids or texts, recorded"
    openapi: ClassVar[dict[str, Any]] = request_body("The fields of a vLLM completion.", {"prompt": _PROMPT})

    def parse(self, request: Request, session: SessionFields | None) -> ChatRequest:
        """See `Dialect.parse`."""
        fields = parse(request.body)
        visible = visible_of_prompts(fields, logprobs=raw_value(fields, "logprobs") is not None)
        apply_session(fields, session)
        special = _special(fields)
        return prompt_request(
            request,
            fields,
            session,
            prompts=read_prompts(fields),
            special=special,
            # what was not requested for the record need not be hidden from the client
            visible=EVERYTHING if special else visible,
            choices=max(1, int(number(fields, "n") or 1)),
            temperature=number(fields, "temperature"),
            routed_experts_start=routed_experts_start(fields),
            record=not special,
            engine_route=EngineRoute.COMPLETIONS,
        )


def _special(fields: Fields) -> Reason | str:
    """The reason why a request is not recorded; empty if there is none.

    With `echo`, requested ids change the text of the response. Beam search returns other log-probabilities
    than those that were sampled from. The other fields make a prompt that ids do not describe.
    """
    special = flag(fields, "echo") or flag(fields, "use_beam_search")
    special = special or any(raw_value(fields, name) is not None for name in ("prompt_embeds", "suffix"))
    return Reason.SPECIAL_REQUEST if special else ""
