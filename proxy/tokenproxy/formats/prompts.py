"""Prompts of ids or text in place of messages: `POST /v1/completions` and `POST /inference/v1/generate`."""

import re
from dataclasses import replace
from typing import Any

import msgspec

from tokenproxy.base.errors import BadRequest
from tokenproxy.base.fields import flag, join, parse, raw_value, read
from tokenproxy.base.http import Request
from tokenproxy.base.request import EVERYTHING, ChatRequest, EngineRoute, GivenIds, Rendering
from tokenproxy.base.types import Fields
from tokenproxy.formats.base import (
    IDS,
    Format,
    NamedSession,
    apply_session,
    request_body,
    shared_fields,
    visible_of,
)
from tokenproxy.formats.prompt_fields import checked_ids
from tokenproxy.record.vocabulary import Reason

_PROMPT = {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, IDS,
                     {"type": "array", "items": IDS}]}  # fmt: skip
_FIELD = "token_ids"
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "ignore_eos"),
    *("n", "max_completion_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "stop", "stop_token_ids", "bad_words"),
    *("include_stop_str_in_output", "allowed_token_ids", "logit_bias"),
)
"""Fields that sessions set and that this route has in `sampling_params`."""
MOST_PROMPTS = 4_096
"""The most prompts of one request."""
_MARKS_PER_PROMPT = 32
_KIND_OF_LIST = re.compile(rb"\[\s*(.)", re.DOTALL)
"""The first byte of the first item of a JSON array."""
_split = msgspec.json.Decoder(list[msgspec.Raw]).decode


class CompletionsFormat(Format):
    """Completions of one prompt or many, with ids and log-probabilities if the client requests them."""

    path = EngineRoute.COMPLETIONS.value
    summary = "Completions of ids or texts, recorded"
    openapi = request_body("The fields of a vLLM completion.", {"prompt": _PROMPT})

    def parse(self, request: Request, session: NamedSession | None) -> ChatRequest:
        """See `Format.parse`."""
        fields = parse(request.body)
        visible = visible_of(fields, logprobs=raw_value(fields, "logprobs") is not None)
        apply_session(fields, session)
        special = _special(fields)
        return _prompt_request(
            *(request, fields, session, fields),
            prompts=_read_prompts(fields),
            special=special,
            # what was not requested for the record need not be hidden from the client
            visible=EVERYTHING if special else visible,
            record=not special,
            engine_route=EngineRoute.COMPLETIONS,
        )


class GenerateFormat(Format):
    """Ids sampled after given ids, with weight versions and sampling masks where the engine returns them.

    vLLM serves this route if it runs with `--enable-scale-out`.
    """

    path = EngineRoute.GENERATE.value
    summary = "Tokens in, tokens out, recorded"
    openapi = request_body(
        "The fields of vLLM's generate route.", {_FIELD: IDS, "sampling_params": {"type": "object"}}
    )

    def parse(self, request: Request, session: NamedSession | None) -> ChatRequest:
        """See `Format.parse`."""
        fields = parse(request.body)
        given = read(fields, "sampling_params", Fields) or {}
        logprobs = raw_value(given, "logprobs") is not None
        visible = visible_of(fields, logprobs=logprobs, route=EngineRoute.GENERATE)
        _apply_session(fields, session)
        sampling = read(fields, "sampling_params", Fields) or {}
        ids = raw_value(fields, _FIELD)
        if ids is None:
            raise BadRequest.of(_FIELD, "is required")
        prompt = checked_ids(_FIELD, ids)
        content = raw_value(fields, "content_parts") not in (None, b"[]")
        return _prompt_request(
            *(request, fields, session, sampling),
            # the engine puts the ids of media into the prompt
            prompts=(None if content else prompt,),
            prompt_media=content or raw_value(fields, "features") is not None,
            visible=visible,
            engine_route=EngineRoute.GENERATE,
        )


def _prompt_request(
    request: Request, fields: Fields, session: NamedSession | None, sampling: Fields, **more: Any
) -> ChatRequest:
    """The `ChatRequest` of a request with prompts in place of messages. Raises BadRequest."""
    return ChatRequest(
        **shared_fields(request, fields, session, sampling),
        messages=b"",
        rendering=Rendering(),
        model=read(fields, "model", str),
        findable=False,
        **more,
    )


def _special(fields: Fields) -> Reason | str:
    """The reason why a request is not recorded; empty if there is none.

    With `echo`, requested ids change the text of the response. Beam search returns other log-probabilities
    than those that were sampled from. The other fields make a prompt that ids do not describe.
    """
    special = flag(fields, "echo") or flag(fields, "use_beam_search")
    special = special or any(raw_value(fields, name) is not None for name in ("prompt_embeds", "suffix"))
    return Reason.SPECIAL_REQUEST if special else ""


def _read_prompts(fields: Fields) -> tuple[GivenIds | None, ...]:
    """The prompts of a completions request, in their order; None for each that is a text.

    Raises:
        BadRequest: `prompt` is missing, empty, or of another shape than vLLM takes.
    """
    raw = raw_value(fields, "prompt")
    if raw is None and raw_value(fields, "prompt_embeds") is not None:
        return (None,)
    if raw is None:
        raise BadRequest.of("prompt", "is required")
    if raw[:1] == b'"':
        return (None,)
    kind = _KIND_OF_LIST.match(raw)
    if kind is None or kind[1] not in (b'"', b"["):
        return (checked_ids("prompt", raw),)
    # a text may hold the marks that separate prompts, but not a hundred thousand of them
    separators = raw.count(b"[") - 1 if kind[1] == b"[" else raw.count(b'",') / _MARKS_PER_PROMPT
    if separators > MOST_PROMPTS or len(prompts := _split(raw)) > MOST_PROMPTS:
        raise BadRequest.of("prompt", f"may hold {MOST_PROMPTS} prompts: send the others later")
    if kind[1] == b"[":
        return tuple(checked_ids("prompt", bytes(each), i) for i, each in enumerate(prompts))
    for position, each in enumerate(prompts):
        if bytes(memoryview(each)[:1]) != b'"':
            raise BadRequest(f"`prompt[{position}]` must be a string, as the first one is", param="prompt")
    return (None,) * len(prompts)


def _apply_session(fields: Fields, session: NamedSession | None) -> None:
    """Apply the session's fields, those for sampling in `sampling_params`. Raises BadRequest."""
    if session is None:
        return

    def of(values: Fields, *, sampling: bool) -> Fields:
        return {name: value for name, value in values.items() if (name in _SAMPLING) is sampling}

    inner = read(fields, "sampling_params", Fields) or {}
    for target, sampling in ((inner, True), (fields, False)):
        defaults = of(session.defaults, sampling=sampling)
        overrides = of(session.overrides, sampling=sampling)
        apply_session(target, replace(session, defaults=defaults, overrides=overrides))
    if inner:
        fields["sampling_params"] = msgspec.Raw(join(inner))
