"""The rest of a choice whose engine broke off: what the next engine is asked for, and how its answer joins.

The next engine gets the prompt and the ids that were sampled after it; its events or its completion become
the rest of the first ones. Tool calls and reasoning are parsed of all ids of the choice, as if they had been
sampled at once, by vLLM's derender route. Where that is missing, only plain text goes on, and a rest that
begins with a call does not: of all ids it might be text. Either way the engine must make of the ids so far
what the client got: else nothing is resumed.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from chat_tokenizer import ids
from tokenproxy.base.errors import CannotGoOn, EngineBroken
from tokenproxy.base.evidence import EVIDENCE, OF_ONE_ENGINE
from tokenproxy.base.fields import NULL, is_null, join, raw, raw_value, read
from tokenproxy.base.http import Request, Response
from tokenproxy.base.request import ChatRequest
from tokenproxy.base.types import Fields, Headers
from tokenproxy.engine.derender import parse_response, read_response_field
from tokenproxy.engine.protocol import Engine, fetch, problem_of
from tokenproxy.engine.sse import DONE, data_event, events
from tokenproxy.turn import wire

_NULL = msgspec.Raw(NULL)
_LIMITS = ("max_completion_tokens", "max_tokens")
"""The first that is set counts, as in vLLM."""
_ROUTE = "the engine that goes on"
_CONSTRAINTS = frozenset({"response_format", "structured_outputs", "tool_choice"})
_WHOLE_ONLY = frozenset({"stop", "echo", "logprob_token_ids", "prompt_logprobs", "kv_transfer_params"})
"""Fields with which nothing is resumed: a stop string may lie across the break, and the others belong to one
request of the engine."""
_BEGIN_ANEW = ("presence_penalty", "frequency_penalty", "seed", "thinking_token_budget", "bad_words")
"""Fields whose effect depends on the ids that a request has sampled: it begins anew with each segment."""
_END = ("finish_reason", "stop_reason")
_UNSET = (None, b"0", b"0.0", b"[]")
_FREE = (None, b'"none"', b'"auto"')
_NOT_SET = (None, b"[]", b'""', b"false")


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
            CannotGoOn: it does not, so that its rest would not fit.
        """
        if _said(parsed) != _said(self.message):
            raise CannotGoOn("the engine parses what was sampled before the break in another way")

    def check_echo(self, echo: bytes | None, *, parsed: bool) -> None:
        """Check the prompt that an engine says it got. Raises CannotGoOn if it is another one.

        Args:
            parsed: whether the answer is one of derender, which tells the prompt of the client.
        """
        used = self.prompt if parsed else ids.concatenate(self.prompt, ids.dump(self.sampled))
        if echo is not None and ids.compact(echo) != ids.compact(used):
            raise CannotGoOn("the engine that goes on did not use the ids that it was given")


def is_whole_only(fields: Mapping[str, msgspec.Raw]) -> bool:
    """Whether a request has fields with which nothing is resumed."""
    given = _WHOLE_ONLY & fields.keys()
    return constrained(fields) or any(raw_value(fields, name) not in _NOT_SET for name in given)


def constrained(fields: Mapping[str, msgspec.Raw]) -> bool:
    """Whether a grammar constrains the completion; vLLM then reads `include_reasoning` to apply it."""
    return any(raw_value(fields, name) not in _FREE for name in _CONSTRAINTS & fields.keys())


def begun_anew(fields: Mapping[str, msgspec.Raw]) -> tuple[str, ...]:
    """The fields of a request whose effect does not reach across a break."""
    return tuple(name for name in _BEGIN_ANEW if raw_value(fields, name) not in _UNSET)


def is_full(fields: Mapping[str, msgspec.Raw], rest: Rest, context: int | None) -> bool:
    """Whether a choice has as many ids as its request and the context allow: only its end was lost.

    Args:
        context: the model's `max_model_len`.
    """
    limit, sampled = _limit(fields), len(rest.sampled)
    at_end = context is not None and context <= ids.check(rest.prompt) + sampled
    return at_end or (limit is not None and limit <= sampled)


def _limit(fields: Mapping[str, msgspec.Raw]) -> int | None:
    """The most ids that may be sampled."""
    return next((limit for name in _LIMITS if (limit := read(fields, name, int)) is not None), None)


def rest_fields(fields: Fields, rest: Rest) -> Fields:
    """The fields of a request for what is left of one choice."""
    left = {name: value for name, value in fields.items() if name not in ("n", "echo", *_LIMITS)}
    sampled = len(rest.sampled)
    if (limit := _limit(fields)) is not None:
        left["max_tokens"] = raw(limit - sampled)
    if (least := read(fields, "min_tokens", int)) is not None:
        left["min_tokens"] = raw(max(0, least - sampled))
    if (seed := read(fields, "seed", int)) is not None and (rest.choice or sampled):
        # the same seed would repeat the random numbers of the first ids, or of another choice
        moved = seed + rest.choice + sampled
        left["seed"] = raw((moved + 2**63) % 2**64 - 2**63)
    return left


async def check_text(engine: Engine, rest: Rest, request: ChatRequest, headers: Headers) -> None:
    """Check that the text of the sampled ids is what the client got, where the engine cannot parse ids.

    Args:
        headers: those of the turn, with its credential.

    Raises:
        CannotGoOn: it is not: there is reasoning, a call, or a character of which some bytes are missing. Or
            it might be the beginning of a call, which is found in a whole answer only.
        ApiError: the engine does not respond.
    """
    if not request.stream and raw_value(request.fields, "tools") not in _NOT_SET:
        raise CannotGoOn("only an engine with --enable-scale-out can look for calls in all that was sampled")
    tokens = msgspec.json.encode({"tokens": rest.sampled})
    status, body = await fetch(engine, Request("POST", "/detokenize", headers, tokens, repeatable=True))
    fields = parse_response(body, "/detokenize") if status == 200 else {}
    text = read_response_field(fields, "prompt", str, "/detokenize")
    if text is None:
        raise CannotGoOn("the engine does not tell the text of what was sampled before the break")
    rest.check({"content": text})


def _said(message: Mapping[str, Any]) -> tuple[str, str, list[tuple[str, str]]]:
    """The content, the reasoning and the calls of a message or a delta."""
    calls: dict[int, list[str]] = {}
    for piece in wire.calls_of(dict(message)):
        name_and_arguments = calls.setdefault(piece.position, ["", ""])
        name_and_arguments[0] = name_and_arguments[0] or piece.name
        name_and_arguments[1] += piece.arguments or ""
    reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
    return (
        message.get("content") or "",
        reasoning,
        [(name, text) for _, (name, text) in sorted(calls.items())],
    )


# --- the answer of the next engine as the rest of the first one's


async def rest_events(
    response: Response, rest: Rest, head: Fields, *, parsed: bool
) -> AsyncIterator[tuple[bytes, int]]:
    """The events of a stream as those of the stream that broke off, without its end and without its usage.

    With each event the number of its ids.

    Args:
        head: the fields that all chunks of the broken stream share.
        parsed: whether the engine parsed the ids before the break too.

    Raises:
        EngineBroken: the engine sends an error, or something that is no chunk, or no finish reason.
        CannotGoOn: it used other ids as its prompt, or calls a tool with the first ids that it parsed alone.
    """
    has_text = has_ended = False
    async for data in events(response.chunks()):
        if data == DONE:
            break
        fields = parse_response(data, _ROUTE)
        if not is_null(error := fields.get("error", _NULL)):
            raise EngineBroken(problem_of(b'{"error":%b}' % bytes(error)).message)
        rest.check_echo(raw_value(fields, "prompt_token_ids"), parsed=parsed)
        for choice in _choices(fields):
            delta = read_response_field(choice, "delta", Fields, _ROUTE) or {}
            delta.pop("role", None)
            tokens = read_response_field(choice, "token_ids", list[int], _ROUTE) or []
            ended = not is_null(choice.get("finish_reason", _NULL))
            has_ended |= ended
            has_text |= raw_value(delta, "content") not in (None, b'""')
            if rest.sampled and not (parsed or has_text) and raw_value(delta, "tool_calls") is not None:
                raise CannotGoOn("the engine parses what follows the break as a call, without what is before")
            if not (ended or tokens or any(raw_value(delta, name) not in (None, b'""') for name in delta)):
                continue  # the chunk with the role
            chunk = {**fields, **head, "choices": raw([_placed(choice | {"delta": raw(delta)}, rest)])}
            chunk.pop("prompt_token_ids", None)
            if (usage := read_response_field(fields, "usage", dict[str, Any], _ROUTE)) is not None:
                chunk["usage"] = raw(_counted(usage, len(rest.sampled)))
            yield data_event(join(chunk)), len(tokens)
    if not has_ended:
        raise EngineBroken("the engine ended its stream before the turn ended")


def end_event(head: Fields, choice: int, reason: str) -> bytes:
    """The event that ends a choice of which no more ids are sampled."""
    end = {"index": choice, "delta": {}, "token_ids": [], "finish_reason": reason}
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
        CannotGoOn: the next engine used other ids as its prompt.
    """
    fields, further = parse_response(body, _ROUTE), parse_response(more, _ROUTE)
    rest.check_echo(raw_value(further, "prompt_token_ids"), parsed=parsed)
    choices, rests = _choices(fields), _choices(further)
    if len(rests) != 1:
        raise EngineBroken(f"{_ROUTE} returned {len(rests)} choices for one")
    position = next(at for at, each in enumerate(choices) if (read(each, "index", int) or 0) == rest.choice)
    first, choice = choices[position], _placed(rests[0], rest)
    if not parsed and (text := rest.message.get("content")):
        message = read_response_field(choice, "message", dict[str, Any], _ROUTE) or {}
        message["content"] = text + (message.get("content") or "")
        choice["message"] = raw(message)
    new = read_response_field(choice, "token_ids", list[int], _ROUTE) or []
    choice["token_ids"] = raw([*rest.sampled, *new])
    before, after = (read_response_field(each, "logprobs", Fields, _ROUTE) or {} for each in (first, choice))
    choice["logprobs"] = raw({**after, "content": raw(_both(before, after, "content"))})
    counts = len(rest.sampled), len(new)
    for fact in EVIDENCE:
        both = fact.join(first.pop(fact.name, None), rests[0].get(fact.name), counts)
        choice.pop(fact.name, None)
        if both is not None:
            choice[fact.name] = both
    choices[position] = {**first, **choice}
    fields["choices"] = raw(choices)
    usage, more_usage = (
        read_response_field(each, "usage", dict[str, Any], _ROUTE) or {} for each in (fields, further)
    )
    count = usage.get("completion_tokens", 0) + more_usage.get("completion_tokens", 0)
    total = usage.get("prompt_tokens", 0) + count
    fields["usage"] = raw(usage | {"completion_tokens": count, "total_tokens": total})
    return join(fields)


def split_end(data: bytes) -> tuple[bytes, bytes]:
    """A chunk whose choices end, as one without their ends and one that holds nothing else.

    What a turn of two segments does not have belongs to the end.
    """
    fields, rests, ends = parse_response(data, _ROUTE), [], []
    for choice in _choices(fields):
        of_end = {name: choice.pop(name) for name in OF_ONE_ENGINE if name in choice}
        end = {name: choice[name] for name in ("index", *_END) if name in choice} | of_end
        rests.append(choice | dict.fromkeys(_END, _NULL))
        ends.append(end | {"delta": raw({}), "token_ids": raw([])})
    return join({**fields, "choices": raw(rests)}), join({**fields, "choices": raw(ends)})


def _placed(choice: Fields, rest: Rest) -> Fields:
    """A choice of the next engine with the index of the one that it continues."""
    placed = choice | {"index": raw(rest.choice)}
    for fact in EVIDENCE:
        if (value := fact.shift(placed.pop(fact.name, None), len(rest.sampled))) is not None:
            placed[fact.name] = value
    return placed


def _counted(usage: dict[str, Any], sampled: int) -> dict[str, Any]:
    """Usage in which the ids that an engine got as part of its prompt count as sampled."""
    prompt = usage.get("prompt_tokens", 0) - sampled
    return usage | {"prompt_tokens": prompt, "completion_tokens": usage.get("completion_tokens", 0) + sampled}


def _choices(fields: Fields) -> list[Fields]:
    return read_response_field(fields, "choices", list[Fields], _ROUTE) or []


def _both(first: Fields, second: Fields, name: str) -> list[msgspec.Raw]:
    """The lists of two answers, one after the other."""
    lists = [read_response_field(each, name, list[msgspec.Raw], _ROUTE) or [] for each in (first, second)]
    return lists[0] + lists[1]
