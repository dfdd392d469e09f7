"""`POST /inference/v1/generate`: tokens in, tokens out, with the weights that sampled each of them."""

from dataclasses import replace
from typing import Any, ClassVar

import msgspec

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
from proxy.dialects.prompt_fields import checked_ids
from proxy.errors import BadRequest
from proxy.fields import join, parse, raw_value, read
from proxy.http import Request
from proxy.turn.request import ChatRequest, EngineRoute
from proxy.types import Fields

_FIELD = "token_ids"
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "stop", "stop_token_ids", "bad_words"),
    *("include_stop_str_in_output", "allowed_token_ids", "logit_bias"),
)
"""Fields that sessions set and that this route has in `sampling_params`."""


class GenerateDialect(Dialect):
    """Ids sampled after given ids, with weight versions and sampling masks where the engine returns them.

    vLLM serves this route if it runs with `--enable-scale-out`.
    """

    path: ClassVar[str] = EngineRoute.GENERATE.value
    summary: ClassVar[str] = "Tokens in, tokens out, recorded"
    openapi: ClassVar[dict[str, Any]] = request_body(
        "The fields of vLLM's generate route.", {_FIELD: IDS, "sampling_params": {"type": "object"}}
    )

    def parse(self, request: Request, session: SessionFields | None) -> ChatRequest:
        """See `Dialect.parse`."""
        fields = parse(request.body)
        given = read(fields, "sampling_params", Fields) or {}
        visible = visible_of_prompts(fields, logprobs=raw_value(given, "logprobs") is not None)
        _apply_session(fields, session)
        sampling = read(fields, "sampling_params", Fields) or {}
        ids = raw_value(fields, _FIELD)
        if ids is None:
            raise BadRequest(f"`{_FIELD}` is required", param=_FIELD)
        prompt = checked_ids(_FIELD, ids)
        content = raw_value(fields, "content_parts") not in (None, b"[]")
        return prompt_request(
            request,
            fields,
            session,
            # the engine puts the ids of media into the prompt
            prompts=(None if content else prompt,),
            prompt_media=content or raw_value(fields, "features") is not None,
            visible=visible,
            choices=max(1, int(number(sampling, "n") or 1)),
            temperature=number(sampling, "temperature"),
            routed_experts_start=routed_experts_start(sampling),
            engine_route=EngineRoute.GENERATE,
        )


def _apply_session(fields: Fields, session: SessionFields | None) -> None:
    """Apply the session's fields, those for sampling in `sampling_params`. Raises BadRequest."""
    if session is None:
        return
    of_sampling = replace(
        session,
        defaults={name: value for name, value in session.defaults.items() if name in _SAMPLING},
        overrides={name: value for name, value in session.overrides.items() if name in _SAMPLING},
    )
    others = replace(
        session,
        defaults={name: value for name, value in session.defaults.items() if name not in _SAMPLING},
        overrides={name: value for name, value in session.overrides.items() if name not in _SAMPLING},
    )
    apply_session(fields, others)
    if of_sampling.defaults or of_sampling.overrides:
        sampling = read(fields, "sampling_params", Fields) or {}
        apply_session(sampling, of_sampling)
        fields["sampling_params"] = msgspec.Raw(join(sampling))
