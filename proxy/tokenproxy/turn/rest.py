"""The rest of a choice whose engine broke off: what the next engine is asked for, and how its answer joins.

The next engine gets the prompt and the ids that were sampled after it; its events or its completion become
the rest of the first ones. Tool calls and reasoning are parsed of all ids of the choice, as if they had been
sampled at once, by vLLM's derender route. Where that is missing, only plain text goes on. Either way the
engine must make of the ids so far what the client got: else nothing is resumed.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from tokenproxy.base.errors import ApiError, EngineBroken
from tokenproxy.base.fields import NULL, is_null, join, parse, raw, raw_value, read
from tokenproxy.base.http import Request, Response
from tokenproxy.base.request import ChatRequest, EngineRoute
from tokenproxy.base.types import Fields, Headers
from tokenproxy.engine.protocol import Engine, fetch
from tokenproxy.engine.sse import data_event, events
from tokenproxy.record.plan import PromptPlan
from tokenproxy.turn import wire

_DONE = b"[DONE]"
_NULL = msgspec.Raw(NULL)
_LIMITS = ("max_tokens", "max_completion_tokens")
_GRAMMARS = ("response_format", "structured_outputs")
_WHOLE_ONLY = ("stop", "logprob_token_ids", "prompt_logprobs", "kv_transfer_params")
"""Fields with which nothing is resumed: a stop string may lie across the break, and the others belong to one
request of the engine."""
_BEGIN_ANEW = ("presence_penalty", "frequency_penalty", "seed", "thinking_token_budget", "bad_words")
"""Fields whose effect depends on the ids that a request has sampled: it begins anew with each segment."""
_AT_END = ("weight_versions", "routed_experts")
"""Fields of a choice that only its last chunk has."""
_UNSET = (None, b"0", b"0.0", b"[]")


class Rest(msgspec.Struct, frozen=True):
    """One choice that has not ended."""

    choice: int
    """Its index."""
    prompt: bytes
    """The prompt as a JSON array of ids."""
    sampled: Sequence[int]
    message: dict[str, Any]
    """What the client got of `sampled`."""

    def check(self, parsed: Mapping[str, Any]) -> None:
        """Check that an engine makes of the sampled ids what the client got.

        Args:
            parsed: a message or delta.

        Raises:
            EngineBroken: it does not, so that its rest would not fit.
        """
        if _said(parsed) != _said(self.message):
            raise EngineBroken("the engine parses what was sampled before the break in another way")


def can_resume(request: ChatRequest, plan: PromptPlan) -> bool:
    """Whether a turn can be resumed at all, wherever its engine breaks off."""
    fields = request.fields
    return not (
        request.engine_route is not EngineRoute.CHAT
        or plan.placement.conversation is None
        or plan.images
        or plan.rendered_images
        or constrained(fields)
        or any(raw_value(fields, name) not in (None, b"[]", b'""') for name in _WHOLE_ONLY)
    )


def constrained(fields: Mapping[str, msgspec.Raw]) -> bool:
    """Whether a grammar constrains the completion; vLLM then reads `include_reasoning` to apply it."""
    free = (None, b'"none"', b'"auto"')
    return any(raw_value(fields, name) for name in _GRAMMARS) or raw_value(fields, "tool_choice") not in free


def begun_anew(fields: Mapping[str, msgspec.Raw]) -> tuple[str, ...]:
    """The fields of a request whose effect does not reach across a break."""
    return tuple(name for name in _BEGIN_ANEW if raw_value(fields, name) not in _UNSET)


def is_full(fields: Mapping[str, msgspec.Raw], sampled: int) -> bool:
    """Whether a choice has as many ids as its request allows: only the end of its stream was lost."""
    limits = [read(fields, name, int) for name in _LIMITS]
    return any(limit is not None and limit <= sampled for limit in limits)


def rest_fields(fields: Fields, sampled: int) -> Fields:
    """The fields of a request for what is left of one choice after some sampled ids."""
    rest = {name: value for name, value in fields.items() if name not in ("n", "echo")}
    for name in _LIMITS:
        if (limit := read(fields, name, int)) is not None:
            rest[name] = raw(limit - sampled)
    if (least := read(fields, "min_tokens", int)) is not None:
        rest["min_tokens"] = raw(max(0, least - sampled))
    if (seed := read(fields, "seed", int)) is not None and sampled:
        rest["seed"] = raw(seed + sampled)  # the same seed would repeat the random numbers of the first ids
    return rest


async def check_text(engine: Engine, rest: Rest, headers: Headers) -> None:
    """Check that the text of the sampled ids is what the client got, where the engine cannot parse ids.

    Args:
        headers: those of the turn, with its credential.

    Raises:
        EngineBroken: it is not: there is reasoning, a call, or a character of which some bytes are missing.
        ApiError: the engine does not respond.
    """
    ids = msgspec.json.encode({"tokens": rest.sampled})
    status, body = await fetch(engine, Request("POST", "/detokenize", headers, ids, repeatable=True))
    text = read(parse(body), "prompt", str) if status == 200 else None
    rest.check({"content": text})


def _said(message: Mapping[str, Any]) -> tuple[str, str, list[tuple[str, str]]]:
    """The content, the reasoning and the calls of a message or a delta."""
    calls: dict[int, list[str]] = {}
    for piece in wire.calls_of(dict(message)):
        name_and_arguments = calls.setdefault(piece.position, ["", ""])
        name_and_arguments[0] += piece.name
        name_and_arguments[1] += piece.arguments or ""
    reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
    return message.get("content") or "", reasoning, [(name, text) for name, text in calls.values()]


# --- the answer of the next engine as the rest of the first one's


async def rest_events(response: Response, rest: Rest, head: Fields) -> AsyncIterator[tuple[bytes, int]]:
    """The events of a stream as those of the stream that broke off, without its end and without its usage.

    With each event the number of its ids.

    Args:
        head: the fields that all chunks of the broken stream share.

    Raises:
        EngineBroken: the engine sends an error, or something that is no chunk.
    """
    async for data in events(response.chunks()):
        if data == _DONE:
            return
        fields = _parsed(data)
        if not is_null(error := fields.get("error", _NULL)):
            raise EngineBroken(wire.problem_of(b'{"error":%b}' % bytes(error)).message)
        for choice in read(fields, "choices", list[Fields]) or ():
            delta = read(choice, "delta", Fields) or {}
            delta.pop("role", None)
            ended = not is_null(choice.get("finish_reason", _NULL))
            if (
                not ended
                and raw_value(delta, "content") in (None, b'""')
                and len(delta) < 2
                and _no_ids(choice)
            ):
                continue  # the chunk with the role
            chunk = {**fields, **head, "choices": raw([_placed(choice | {"delta": raw(delta)}, rest)])}
            chunk.pop("prompt_token_ids", None)
            if (usage := read(fields, "usage", dict[str, Any])) is not None:
                chunk["usage"] = raw(_counted(usage, len(rest.sampled)))
            yield data_event(join(chunk)), len(read(choice, "token_ids", list[int]) or ())


def full_event(head: Fields, choice: int) -> bytes:
    """The event that ends a choice of which no more ids may be sampled."""
    end = {"index": choice, "delta": {}, "token_ids": [], "finish_reason": "length"}
    return data_event(join({**head, "choices": raw([end])}))


def usage_event(head: Fields, prompt: int, sampled: int) -> bytes:
    """The event with the usage of a whole stream."""
    usage = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    return data_event(join({**head, "choices": raw([]), "usage": raw(usage)}))


def joined(body: bytes, rest: Rest, more: bytes, *, parsed: bool) -> bytes:
    """A whole completion in which one choice goes on.

    Args:
        body: the completion whose engine broke off.
        more: the completion of the next engine, whose only choice is the rest of that choice.
        parsed: whether the message of `more` is that of all ids; else it is that of the rest.

    Raises:
        EngineBroken: `more` is no completion.
    """
    fields, further = _parsed(body), _parsed(more)
    choices, [choice] = (
        read(fields, "choices", list[Fields]) or [],
        read(further, "choices", list[Fields]) or [{}],
    )
    position = next(at for at, each in enumerate(choices) if (read(each, "index", int) or 0) == rest.choice)
    first, choice = choices[position], _placed(choice, rest)
    if not parsed:
        message = read(choice, "message", dict[str, Any]) or {}
        message["content"] = (rest.message.get("content") or "") + (message.get("content") or "")
        choice["message"] = raw(message)
    choice["token_ids"] = raw([*rest.sampled, *(read(choice, "token_ids", list[int]) or ())])
    before, after = (read(each, "logprobs", Fields) or {} for each in (first, choice))
    entries = [read(each, "content", list[msgspec.Raw]) or [] for each in (before, after)]
    choice["logprobs"] = raw({**after, "content": raw(entries[0] + entries[1])})
    spans = [read(each, "weight_versions", list[msgspec.Raw]) or [] for each in (first, choice)]
    if any(spans):
        choice["weight_versions"] = raw(spans[0] + spans[1])
    choices[position] = {**first, **choice}
    fields["choices"] = raw(choices)
    usage, more_usage = (read(each, "usage", dict[str, Any]) or {} for each in (fields, further))
    count = usage.get("completion_tokens", 0) + more_usage.get("completion_tokens", 0)
    total = usage.get("prompt_tokens", 0) + count
    fields["usage"] = raw(usage | {"completion_tokens": count, "total_tokens": total})
    return join(fields)


def split_end(data: bytes) -> tuple[bytes, bytes]:
    """A chunk whose choices end, as one without their ends and one that holds nothing else."""
    fields, rests, ends = parse(data), [], []
    for choice in read(fields, "choices", list[Fields]) or ():
        end = {
            name: choice[name]
            for name in ("index", "finish_reason", "stop_reason", *_AT_END)
            if name in choice
        }
        rests.append({name: value for name, value in choice.items() if name not in _AT_END})
        rests[-1] |= {"finish_reason": _NULL, "stop_reason": _NULL}
        ends.append(end | {"delta": raw({}), "token_ids": raw([])})
    return join({**fields, "choices": raw(rests)}), join({**fields, "choices": raw(ends)})


def _placed(choice: Fields, rest: Rest) -> Fields:
    """A choice of the next engine with the index of the one that it continues."""
    placed = choice | {"index": raw(rest.choice)}
    spans = read(choice, "weight_versions", list[dict[str, Any]])
    if spans:
        before = len(rest.sampled)
        moved = [span | {name: span[name] + before for name in ("start", "end")} for span in spans]
        placed["weight_versions"] = raw(moved)
    placed.pop("routed_experts", None)  # one array for each segment: they are not joined
    return placed


def _counted(usage: dict[str, Any], sampled: int) -> dict[str, Any]:
    """Usage in which the ids that an engine got as part of its prompt count as sampled."""
    prompt = usage.get("prompt_tokens", 0) - sampled
    return usage | {"prompt_tokens": prompt, "completion_tokens": usage.get("completion_tokens", 0) + sampled}


def _no_ids(choice: Fields) -> bool:
    return raw_value(choice, "token_ids") in (None, NULL, b"[]")


def _parsed(data: bytes) -> Fields:
    try:
        return parse(data)
    except ApiError as error:
        raise EngineBroken("the engine returned no completion") from error
