"""`POST /generate/` and `POST /chat/`: the routes of TRL's own server, `trl vllm-serve`, up to TRL 1.10.

A request holds a batch. Each of its prompts is parsed to one `ChatRequest`, and the completions of all are
put into one response:

    {"prompt_ids": one list for each prompt,
     "completion_ids": one list for each completion, `n` for each prompt,
     "logprobs": for each completion and token a list, the most probable first; null without `logprobs`,
     "logprob_token_ids": the ids of these}
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from chat_tokenizer import ids
from tokenproxy.base.errors import BadRequest, EngineBroken
from tokenproxy.base.fields import is_null, raw, raw_value, read
from tokenproxy.base.http import Request
from tokenproxy.base.request import ChatRequest, RetrySigns, Visible
from tokenproxy.base.types import Fields
from tokenproxy.formats.base import NamedSession, apply_session, chat_request
from tokenproxy.formats.prompt_fields import checked_ids
from tokenproxy.formats.prompts import MOST_PROMPTS
from tokenproxy.record.completion import Completion
from tokenproxy.turn import wire
from tokenproxy.turn.answer import Answer

_DEFAULTS: Mapping[str, Any] = {
    **{"n": 1, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0},
    **{"max_tokens": 16, "logprobs": 0},
}
"""The sampling parameters of a request with TRL's defaults."""
_MORE = frozenset(
    {
        *("allowed_token_ids", "bad_words", "frequency_penalty", "ignore_eos", "include_stop_str_in_output"),
        *("logit_bias", "min_tokens", "presence_penalty", "seed", "skip_special_tokens"),
        *("spaces_between_special_tokens", "stop", "stop_token_ids", "structured_outputs"),
    }
)
"""Sampling parameters of `generation_kwargs` that vLLM's chat route has too, under the same names."""
_REGEX = ("structured_outputs_regex", "guided_decoding_regex")
"""The field's name, and that of TRL before 0.25."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The prompts of a request, and what they have in common."""

    prompts: list["Prompt"]
    fields: Fields
    """Of the chat completion of each prompt."""
    visible: Visible


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a batch: text, ids or messages."""

    field: str
    """Its name in error messages: `prompts[3]`."""
    raw: bytes
    """A JSON string, an array of ids, or an array of messages."""
    images: tuple[str, ...] | None = None
    """The images of a prompt of text or ids, as base64 or data URLs; None if the client named none."""

    @property
    def images_field(self) -> str:
        """The name of the field with its images in error messages: `images[3]`."""
        return f"images{self.field[self.field.index('[') :]}"

    @property
    def is_text(self) -> bool:
        """Whether it must be tokenised first."""
        return self.raw[:1] == b'"'

    @property
    def is_messages(self) -> bool:
        """Whether the chat template renders it."""
        return self.raw[1:].lstrip()[:1] == b"{"


def parse_batch(fields: Fields, name: str) -> Batch:
    """Parse a request.

    Args:
        name: the field with the prompts: `prompts` or `messages`.

    Raises:
        BadRequest: a field is missing or has a wrong type; `param` names it.
    """
    prompts = read(fields, name, list[msgspec.Raw])
    if not prompts:
        raise BadRequest.of(name, "is required: a list of at least one prompt")
    if len(prompts) > MOST_PROMPTS:
        raise BadRequest.of(name, f"may hold {MOST_PROMPTS} prompts: send the others later")
    images = read(fields, "images", list[list[str] | None]) or [None] * len(prompts)
    if len(images) != len(prompts):
        raise BadRequest.of("images", "must have one entry for each prompt")
    batch = []
    for index, (value, named) in enumerate(zip(prompts, images, strict=True)):
        prompt = Prompt(f"{name}[{index}]", bytes(value).strip(), None if named is None else tuple(named))
        if prompt.is_messages and named:
            raise BadRequest.of(
                f"images[{index}]", "are those of messages: send them as parts of type `image_url`"
            )
        if not (prompt.is_text or prompt.is_messages):
            checked_ids(prompt.field, prompt.raw)
        batch.append(prompt)
    sampling = _sampling(fields)
    for other in ("tools", "chat_template_kwargs"):
        if (value_of := raw_value(fields, other)) not in (None, b"[]", b"{}"):
            sampling[other] = msgspec.Raw(value_of)
    if "tools" in sampling:
        sampling["tool_choice"] = raw("none")  # the template prints them, and TRL parses the calls itself
    return Batch(batch, sampling, Visible(ids=True, logprobs="logprobs" in sampling))


def _sampling(fields: Fields) -> Fields:
    """The sampling parameters as a chat completion has them."""
    more = read(fields, "generation_kwargs", Fields) or {}
    for name in more:
        if name not in _MORE and name not in _DEFAULTS:
            param = f"generation_kwargs.{name}"
            raise BadRequest.of(param, "is not a sampling parameter of this route")
    taken = {name: fields.get(name, raw(default)) for name, default in _DEFAULTS.items()} | more
    for name in _DEFAULTS:
        read(taken, name, float)  # for its error
    for name in _REGEX:
        if (pattern := read(fields, name, str)) is not None:
            taken["structured_outputs"] = raw({"regex": pattern})
    top = taken.pop("logprobs")
    taken["return_token_ids"] = taken["return_tokens_as_token_ids"] = msgspec.Raw(b"true")
    return taken if is_null(top) else taken | {"logprobs": msgspec.Raw(b"true"), "top_logprobs": top}


def turn_of(prompt: Prompt, batch: Batch, request: Request, session: NamedSession | None) -> ChatRequest:
    """The turn of one prompt, which is not text.

    Raises:
        BadRequest: its messages cannot be read.
    """
    fields = dict(batch.fields)
    apply_session(fields, session)
    given: dict[str, Any] = {"retry": RetrySigns()}  # a retry repeats the batch, not one of its turns
    if prompt.is_messages:
        fields["messages"] = _with_image_urls(prompt)
    else:
        checked = checked_ids(prompt.field, prompt.raw)
        given["given"] = replace(checked, raw=ids.compact(checked.raw))
        given |= {"images": prompt.images, "images_field": prompt.images_field}
        given["token_route"] = True
    return chat_request(request, fields, session, batch.visible, **given)


def _with_image_urls(prompt: Prompt) -> msgspec.Raw:
    """Messages with images in OpenAI's format: TRL's client sends base64 in parts of type `image_pil`."""
    if b'"image_pil"' not in prompt.raw:
        return msgspec.Raw(prompt.raw)
    messages = read({prompt.field: msgspec.Raw(prompt.raw)}, prompt.field, list[dict[str, Any]]) or []
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and isinstance(image := part.pop("image_pil", None), str):
                url = image if image[:5].lower() == "data:" else f"data:image/png;base64,{image}"
                part |= {"type": "image_url", "image_url": {"url": url}}
    return raw(messages)


# --- the response


class TrlAnswer(Answer):
    """What one prompt got, as JSON for the response to its batch."""

    def __init__(self, *, logprobs: bool) -> None:
        """`logprobs`: whether the client requested log-probabilities."""
        self.with_logprobs = logprobs
        self.prompt = msgspec.Raw()
        self.completions: list[msgspec.Raw] = []
        """The sampled ids of each completion."""
        self.logprobs: list[msgspec.Raw] = []
        """Those of each completion; empty if they were not requested."""
        self.logprob_ids: list[msgspec.Raw] = []
        """The ids that these belong to."""

    def whole(self, whole: wire.Completion, body: bytes, read: Completion) -> bytes:
        """Keep a completion.

        Raises:
            EngineBroken: it holds no ids, or no log-probabilities although they were requested.
        """
        if not whole.prompt_token_ids or is_null(whole.prompt_token_ids):
            raise EngineBroken("the engine returned no prompt ids")
        self.prompt = whole.prompt_token_ids
        by_index = {choice.index or 0: choice for choice in whole.choices or ()}
        for sampled in sorted(read.choices, key=lambda choice: choice.index):
            if sampled.ids is None:
                raise EngineBroken("the engine returned no completion ids")
            self.completions.append(raw(list(sampled.ids)))
            if not self.with_logprobs:
                continue
            logprobs = wire.token_logprobs_of(by_index[sampled.index].logprobs)
            positions = (logprobs and logprobs.content) or ()
            if len(positions) != len(sampled.ids):
                raise EngineBroken("the engine returned other numbers of ids and of log-probabilities")
            ranked = [_ranked([position, *position.top_logprobs]) for position in positions]
            self.logprobs.append(raw([[logprob for _, logprob in top] for top in ranked]))
            self.logprob_ids.append(raw([[token for token, _ in top] for top in ranked]))
        return b""


def batch_answer(answers: Sequence[TrlAnswer]) -> dict[str, Any]:
    """The response to a batch."""
    logprobs = any(answer.with_logprobs for answer in answers)
    ranked = [each for answer in answers for each in answer.logprob_ids]
    return {
        "prompt_ids": [answer.prompt for answer in answers],
        "completion_ids": [each for answer in answers for each in answer.completions],
        "logprobs": [each for answer in answers for each in answer.logprobs] if logprobs else None,
        "logprob_token_ids": ranked if logprobs else None,
    }


def _ranked(tokens: Iterable[wire.Candidate]) -> list[tuple[int, float | None]]:
    """The ids at one position with their log-probabilities, the most probable first; NaN is None."""
    found: dict[int, float | None] = {}
    for each in tokens:
        name, _, digits = each.token.partition(":")
        if name != "token_id" or not digits.isdecimal():
            raise EngineBroken("the engine returned tokens where ids were requested")
        found.setdefault(int(digits), None if math.isnan(each.logprob) else each.logprob)
    # NaN is last, as where it is ranked
    return sorted(found.items(), key=lambda item: -math.inf if item[1] is None else item[1], reverse=True)
