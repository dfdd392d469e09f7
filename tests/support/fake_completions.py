"""What a fake vLLM's completions route answers: choices prompt by prompt, each with the ids of its prompt."""

from collections.abc import Iterator, Sequence
from typing import Any

from tests.support.fake_wire import Asked, Reply, counts, steps_of, usage_of
from tests.support.tiny_model import TinyModel


def prompts_of(model: TinyModel, prompt: Any) -> list[list[int]]:
    """The ids of each prompt of a request."""
    if isinstance(prompt, str):
        return [model.encode(prompt)]
    if all(isinstance(token, int) for token in prompt):
        return [list(prompt)]
    return [model.encode(one) if isinstance(one, str) else list(one) for one in prompt]


def completed_of(
    model: TinyModel, replies: Sequence[Reply], prompts: Sequence[list[int]], body: dict[str, Any]
) -> dict[str, Any]:
    """A whole answer; `replies` are the scripts of the prompts."""
    asked = Asked(body)
    scripts = [
        (one, prompt)
        for prompt, reply in zip(prompts, replies, strict=True)
        for one in reply.choices(asked.n)
    ]
    choices = [
        {
            "index": index,
            "text": model.decode(list(one.ids)),
            "logprobs": _logprobs(one, one.ids, body),
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop,
            "token_ids": asked.sampled(one),
            "prompt_logprobs": None,
            "prompt_token_ids": asked.echo(one, prompt),
            "routed_experts": one.routed_experts,
        }
        for index, (one, prompt) in enumerate(scripts)
    ]
    usage = usage_of(sum(map(len, prompts)), [one for one, _ in scripts])
    return {**_fixed(body), "choices": choices, "system_fingerprint": "vllm", "usage": usage}


def completed_chunks_of(
    model: TinyModel, replies: Sequence[Reply], prompts: Sequence[list[int]], body: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """The events of a stream, one for each sampled id; only the first choice of a prompt echoes it."""
    asked, sampled = Asked(body), 0
    for position, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        echo = asked.echo(reply, prompt)
        for index, one, at in steps_of(reply, asked.n):
            last = at == len(one.ids) - 1
            choice = {
                "index": position * asked.n + index,
                "text": model.decode([one.ids[at]]),
                "logprobs": _logprobs(one, one.ids[at : at + 1], body),
                "finish_reason": one.finish_reason if last else None,
                "stop_reason": one.stop if last else None,
                "prompt_token_ids": echo,
                "token_ids": asked.sampled(one, at, at + 1),
            }
            echo, sampled = None, sampled + 1
            usage = {"usage": counts(len(prompt), at + 1 + one.miscounted)} if asked.running_usage else {}
            yield {**_fixed(body), "choices": [choice], **usage}
    if asked.usage:
        yield {**_fixed(body), "choices": [], "usage": counts(sum(map(len, prompts)), sampled)}


def _fixed(body: dict[str, Any]) -> dict[str, Any]:
    return {"id": "cmpl-fake", "object": "text_completion", "created": 1, "model": body.get("model", "tiny")}


def _logprobs(reply: Reply, ids: Sequence[int], body: dict[str, Any]) -> dict[str, Any] | None:
    """Of each id, and of itself as the only alternative."""
    if body.get("logprobs") is None or "logprobs" in reply.silent:
        return None
    spelled = "token_id:{}" if body.get("return_tokens_as_token_ids") else "{}"
    tokens, values = [spelled.format(token) for token in ids], [-token / 8 for token in ids]
    return {
        "text_offset": [0] * len(ids),
        "token_logprobs": values,
        "tokens": tokens,
        "top_logprobs": [{token: value} for token, value in zip(tokens, values, strict=True)],
    }
