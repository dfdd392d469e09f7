"""What a fake vLLM's scale-out routes answer: a parser is configured, so derender shows special tokens."""

from collections.abc import Iterator, Sequence
from typing import Any

from tests.support.fake_wire import Asked, Reply, completion_of, counts, first_delta, steps_of, usage_of
from tests.support.tiny_model import TinyModel

_NOTHING = {"stop_reason": None, "routed_experts": None, "sampling_mask": None, "weight_versions": None}
_ABSENT = {"prompt_logprobs": None, "metrics": None, "kv_transfer_params": None}


def sampling_of(body: dict[str, Any], most: int) -> dict[str, Any]:
    """The sampling parameters that render resolves; what is vLLM's own default is left out."""
    sampling: dict[str, Any] = {
        name: body[name] for name in ("max_tokens", "temperature", "n") if name in body
    }
    sampling.setdefault("max_tokens", most)
    if body.get("logprobs"):
        sampling["logprobs"] = body.get("top_logprobs") or 0
    if sampling["max_tokens"] == 16:
        del sampling["max_tokens"]
    return sampling


def generated_of(model: TinyModel, reply: Reply, prompt: Sequence[int], body: dict[str, Any]) -> Any:
    """A whole answer of generate."""
    asked = Asked(body)
    scripts = reply.choices(asked.n)
    return {
        "request_id": generation_name(body),
        "created": 5,
        "output_mode": body.get("output_mode", "tokens"),
        **_ABSENT,
        "prompt_token_ids": asked.echo(reply, prompt),
        "choices": [
            {**_generated(model, one, index, range(len(one.ids)), body), **_end_of(one)}
            for index, one in enumerate(scripts)
        ],
        "usage": _total(len(prompt), scripts),
    }


def generated_chunks_of(
    model: TinyModel, reply: Reply, prompt: Sequence[int], body: dict[str, Any]
) -> Iterator[Any]:
    """The events of generate: one for each sampled token and choice."""
    asked = Asked(body)
    fixed = {"request_id": generation_name(body), "output_mode": body.get("output_mode", "tokens")}
    echo = {"prompt_token_ids": asked.echo(reply, prompt)} if asked.ids else {}
    for index, one, at in steps_of(reply, asked.n):
        ending = _end_of(one) if at == len(one.ids) - 1 else {"finish_reason": None}
        choice = {**_generated(model, one, index, [at], body), **ending}
        running = {**counts(len(prompt), at + 1 + one.miscounted), "prompt_tokens_details": None}
        yield {**fixed, "usage": running if asked.running_usage else None, "choices": [choice], **echo}
        echo = {}
    if asked.usage:
        yield {**fixed, "choices": [], "usage": _total(len(prompt), reply.choices(asked.n))}


def generation_name(body: dict[str, Any]) -> str:
    """The request id that generate answers."""
    return f"generate-tokens-{body.get('request_id', 'none')}"


def _end_of(reply: Reply) -> dict[str, Any]:
    """What the last event of a choice has."""
    return {
        "finish_reason": reply.finish_reason,
        "stop_reason": reply.stop,
        "weight_versions": [{"version": "7", "start": 0, "end": len(reply.ids)}],
        "routed_experts": reply.routed_experts,
    }


def _total(prompt: int, scripts: Sequence[Reply]) -> dict[str, Any]:
    return {**usage_of(prompt, scripts), "prompt_tokens_details": {"cached_tokens": 1}}


def _generated(
    model: TinyModel, reply: Reply, index: int, positions: Sequence[int], body: dict[str, Any]
) -> dict[str, Any]:
    """What choices of generate have alike, whole or not."""
    tokens = [reply.ids[at] for at in positions]
    choice: dict[str, Any] = {"index": index, **_NOTHING, "logprobs": None, "token_ids": tokens}
    if reply.mask is not None:
        choice["sampling_mask"] = [reply.mask[at] for at in positions]
    text = body.get("output_mode") == "text"
    if text:
        choice["text"] = model.decode(tokens)
    if "logprobs" in body["sampling_params"] and "logprobs" not in reply.silent:
        # vLLM adds the sampled token as an alternative, requested or not
        old = "prompt" in reply.silent
        entries = [_logprob(one, text, old) for one in tokens]
        content = [{**entry, "top_logprobs": [entry]} for entry in entries]
        choice["logprobs"] = {"content": content}
    return choice


def _logprob(token: int, text: bool, old: bool) -> dict[str, Any]:
    if old:
        return {"token": f"token_id:{token}", "logprob": -token / 8, "bytes": None}
    if text:
        return {"token": str(token), "logprob": -token / 8, "bytes": list(str(token).encode())}
    return {"token_id": token, "logprob": -token / 8, "rank": 1}


def refused_by_derender(body: dict[str, Any]) -> str | None:
    """Why derender does not take a request."""
    whole = body.get("generate_response")
    if (whole or body["generate_chunk"]).get("output_mode", "tokens") != "tokens":
        return "Input should be 'tokens'"
    if whole is not None and not all(choice["token_ids"] for choice in whole["choices"]):
        return "choice 0 has empty or null token_ids"
    return None


def derendered_of(model: TinyModel, reply: Reply, body: dict[str, Any]) -> Any:
    """A whole completion of derender: the text is that of the ids it got."""
    generated = body["generate_response"]
    sources = generated["choices"]
    prompt = range(body.get("prompt_tokens") or 0)
    completion = completion_of(model, reply, prompt, {"n": len(sources), "model": body.get("model")})
    scripts = reply.choices(len(sources))
    for source, choice, one in zip(sources, completion["choices"], scripts, strict=True):
        choice |= {"index": source["index"], "finish_reason": source["finish_reason"]}
        choice["message"] |= {"content": _shown(model, source["token_ids"]), **one.message}
    return {**completion, "created": 9, "id": generated["request_id"], "system_fingerprint": None}


def derendered_chunk_of(model: TinyModel, reply: Reply, body: dict[str, Any]) -> Any:
    """A chunk of derender, and the state of its choice after it."""
    chunk = body["generate_chunk"]
    state = body.get("stream_state") or {"output_token_ids": [], "role_sent": False}
    made = []
    for source in chunk["choices"]:
        one = reply.choices(source["index"] + 1)[-1]
        delta: dict[str, Any] = {"role": None, "content": None, "reasoning": None}
        if not state["role_sent"]:
            delta |= {"role": "assistant", **first_delta(one)}
        if one.deltas:
            before = len(state["output_token_ids"])
            delta |= _merged(one.deltas[before : before + len(source["token_ids"])])
        elif "content" not in one.message:
            delta["content"] = _shown(model, source["token_ids"]) or None
        state = {"output_token_ids": state["output_token_ids"] + source["token_ids"], "role_sent": True}
        ended = source["finish_reason"]
        calls = one.message.get("tool_calls") or any("tool_calls" in each for each in one.deltas)
        finish = "tool_calls" if ended and calls else ended
        nothing = {"logprobs": None, "stop_reason": source.get("stop_reason"), "token_ids": None}
        made.append({"index": source["index"], "delta": delta, "finish_reason": finish, **nothing})
    number = 9 + len(state["output_token_ids"])
    fixed = {"id": chunk["request_id"], "object": "chat.completion.chunk", "created": number}
    absent = {"usage": None, "system_fingerprint": None, "prompt_token_ids": None, "prompt_text": None}
    named = {"model": body.get("model") or "tiny", **absent, "metrics": None, "choices": made}
    return {"chunk": {**fixed, **named}, "stream_state": state}


def _merged(deltas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The delta of several ids: the pieces of its only call as one."""
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    if not calls:
        return {}
    arguments = "".join(call["function"]["arguments"] for call in calls)
    return {"tool_calls": [{**calls[0], "function": {**calls[0]["function"], "arguments": arguments}}]}


def _shown(model: TinyModel, ids: list[int]) -> str:
    """Text of ids with special tokens in it."""
    text: str = model.reference.decode(ids, skip_special_tokens=False)
    return text
