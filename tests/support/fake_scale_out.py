"""What a fake vLLM's scale-out routes answer: a parser is configured, so derender shows special tokens."""

from collections.abc import Iterator
from typing import Any

from tests.support.fake_wire import Reply, choice_of, completion_of, echoed, steps_of, usage_of
from tests.support.tiny_model import TinyModel

_NOTHING = {"stop_reason": None, "routed_experts": None, "sampling_mask": None, "weight_versions": None}
_ABSENT = {"prompt_logprobs": None, "prompt_token_ids": None, "metrics": None, "kv_transfer_params": None}


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


def generated_of(model: TinyModel, reply: Reply, name: str, prompt: int, body: dict[str, Any]) -> Any:
    """A whole answer of generate."""
    n = body["sampling_params"].get("n") or 1
    choices = [
        {
            **_generated(model, one, index, list(range(len(one.ids))), body),
            "token_ids": one.told,
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop,
            "weight_versions": [{"version": "7", "start": 0, "end": len(one.ids)}],
            "routed_experts": one.routed_experts,
        }
        for index, one in enumerate(reply.choices(n))
    ]
    mode = body.get("output_mode", "tokens")
    usage = {**usage_of(prompt, reply, n), "prompt_tokens_details": {"cached_tokens": 1}}
    return {
        "request_id": name,
        "created": 5,
        "output_mode": mode,
        **_ABSENT,
        "prompt_token_ids": echoed(reply, body["token_ids"]) if body.get("return_token_ids") else None,
        "choices": choices,
        "usage": usage,
    }


def generated_chunks_of(
    model: TinyModel, reply: Reply, name: str, prompt: int, body: dict[str, Any]
) -> Iterator[Any]:
    """The events of generate: one for each sampled token and choice."""
    n, options = body["sampling_params"].get("n") or 1, body.get("stream_options") or {}
    mode = body.get("output_mode", "tokens")
    echo = {"prompt_token_ids": echoed(reply, body["token_ids"])} if body.get("return_token_ids") else {}
    for step in steps_of(reply, n):
        for index, one, at in step:
            choice = {**_generated(model, one, index, [at], body), "finish_reason": None}
            choice["token_ids"] = [] if at in one.lost_ids else [one.ids[at]]
            if at == len(one.ids) - 1:
                spans = [{"version": "7", "start": 0, "end": len(one.ids)}]
                choice |= {"finish_reason": one.finish_reason, "weight_versions": spans}
                choice |= {"stop_reason": one.stop, "routed_experts": one.routed_experts}
            sampled = at + 1 + one.miscounted
            running = options.get("include_usage") and options.get("continuous_usage_stats")
            counts = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
            usage = {**counts, "prompt_tokens_details": None} if running else None
            yield {"request_id": name, "usage": usage, "output_mode": mode, "choices": [choice], **echo}
            echo = {}
    if options.get("include_usage"):
        total = {**usage_of(prompt, reply, n), "prompt_tokens_details": {"cached_tokens": 1}}
        yield {"request_id": name, "output_mode": mode, "choices": [], "usage": total}


def _generated(
    model: TinyModel, reply: Reply, index: int, positions: list[int], body: dict[str, Any]
) -> dict[str, Any]:
    """What choices of generate have alike, whole or not."""
    choice: dict[str, Any] = {"index": index, **_NOTHING, "logprobs": None}
    tokens = [reply.ids[at] for at in positions]
    if reply.mask is not None:
        choice["sampling_mask"] = [reply.mask[at] for at in positions]
    text = body.get("output_mode") == "text"
    if text:
        choice["text"] = model.decode(tokens)
    if "logprobs" in body["sampling_params"] and "logprobs" not in reply.silent:
        told = tokens[: len(tokens) - reply.logprobs_short]
        # vLLM adds the sampled token as an alternative, requested or not
        content = [{**entry, "top_logprobs": [entry]} for entry in (_logprob(one, text) for one in told)]
        choice["logprobs"] = {"content": content}
    return choice


def _logprob(token: int, text: bool) -> dict[str, Any]:
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


def derendered_of(model: TinyModel, reply: Reply, model_name: str, body: dict[str, Any]) -> Any:
    """A whole completion of derender: the text is that of the ids it got."""
    generated = body["generate_response"]
    scripts = reply.choices(len(generated["choices"]))
    choices = []
    for source, one in zip(generated["choices"], scripts, strict=True):
        choice = {**choice_of(model, source["index"], one, False), "finish_reason": source["finish_reason"]}
        choice["message"] |= {"content": _shown(model, source["token_ids"]), **one.message}
        choices.append(choice)
    completion = completion_of(choices, body.get("prompt_tokens") or 0, scripts[0], model_name)
    return {**completion, "created": 9, "id": generated["request_id"], "system_fingerprint": None}


def derendered_chunk_of(model: TinyModel, reply: Reply, model_name: str, body: dict[str, Any]) -> Any:
    """A chunk of derender, and the state of its choice after it."""
    chunk = body["generate_chunk"]
    state = body.get("stream_state") or {"output_token_ids": [], "role_sent": False}
    made = []
    for source in chunk["choices"]:
        one = reply.choices(source["index"] + 1)[-1]
        delta: dict[str, Any] = {"role": None, "content": None, "reasoning": None}
        if not state["role_sent"]:
            calls = one.message.get("tool_calls")
            delta |= {"role": "assistant", **one.message}
            if calls:
                delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        if "content" not in one.message:
            delta["content"] = _shown(model, source["token_ids"]) or None
        state = {"output_token_ids": state["output_token_ids"] + source["token_ids"], "role_sent": True}
        ended = source["finish_reason"]
        finish = "tool_calls" if ended and one.message.get("tool_calls") else ended
        nothing = {"logprobs": None, "stop_reason": source.get("stop_reason"), "token_ids": None}
        made.append({"index": source["index"], "delta": delta, "finish_reason": finish, **nothing})
    number = 9 + len(state["output_token_ids"])
    fixed = {"id": chunk["request_id"], "object": "chat.completion.chunk", "created": number}
    absent = {"usage": None, "system_fingerprint": None, "prompt_token_ids": None, "prompt_text": None}
    return {
        "chunk": {**fixed, "model": model_name, **absent, "metrics": None, "choices": made},
        "stream_state": state,
    }


def _shown(model: TinyModel, ids: list[int]) -> str:
    """Text of ids with special tokens in it."""
    text: str = model.reference.decode(ids, skip_special_tokens=False)
    return text
