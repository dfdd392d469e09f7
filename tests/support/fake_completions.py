"""What a fake vLLM's completions route answers: choices prompt by prompt, each with the ids of its prompt."""

from collections.abc import Iterator, Sequence
from typing import Any

from tests.support.fake_wire import Reply, echoed, steps_of
from tests.support.tiny_model import TinyModel


def prompts_of(model: TinyModel, prompt: Any) -> list[list[int]]:
    """The ids of each prompt of a request."""
    if isinstance(prompt, str):
        return [model.encode(prompt)]
    if all(isinstance(token, int) for token in prompt):
        return [list(prompt)]
    return [model.encode(one) if isinstance(one, str) else list(one) for one in prompt]


def completed_of(
    model: TinyModel, prompts: Sequence[list[int]], replies: Sequence[Reply], asked: dict[str, Any]
) -> dict[str, Any]:
    """A whole answer; `replies` are the scripts of the prompts."""
    n, with_ids = asked.get("n") or 1, asked.get("return_token_ids")
    choices: list[dict[str, Any]] = []
    for prompt, reply in zip(prompts, replies, strict=True):
        for one in reply.choices(n):
            ids = list(one.ids)
            choices.append(
                {
                    "index": len(choices),
                    "text": model.decode(ids),
                    "logprobs": _logprobs(one, ids, asked),
                    "finish_reason": one.finish_reason,
                    "stop_reason": one.stop,
                    "token_ids": one.told if with_ids and "ids" not in one.silent else None,
                    "prompt_logprobs": None,
                    "prompt_token_ids": echoed(one, prompt) if with_ids else None,
                    "routed_experts": one.routed_experts,
                }
            )
    sampled = sum(len(one.ids) + one.miscounted for reply in replies for one in reply.choices(n))
    usage = _usage(sum(map(len, prompts)), sampled)
    return {**_fixed(asked), "choices": choices, "system_fingerprint": "vllm", "usage": usage}


def completed_chunks_of(
    model: TinyModel, prompts: Sequence[list[int]], replies: Sequence[Reply], asked: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """The events of a stream, one for each sampled id; only the first choice of a prompt echoes it."""
    n, with_ids, options = (
        asked.get("n") or 1,
        asked.get("return_token_ids"),
        asked.get("stream_options") or {},
    )
    running = options.get("include_usage") and options.get("continuous_usage_stats")
    sampled = 0
    for position, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        echo = echoed(reply, prompt) if with_ids else None
        for step in steps_of(reply, n):
            for index, one, at in step:
                last = at == len(one.ids) - 1
                choice = {
                    "index": position * n + index,
                    "text": model.decode([one.ids[at]]),
                    "logprobs": _logprobs(one, [one.ids[at]], asked),
                    "finish_reason": one.finish_reason if last else None,
                    "stop_reason": one.stop if last else None,
                    "prompt_token_ids": echo,
                    "token_ids": [one.ids[at]] if with_ids and at not in one.lost_ids else None,
                }
                echo = None
                sampled += 1
                usage = {"usage": _usage(len(prompt), at + 1 + one.miscounted)} if running else {}
                yield {**_fixed(asked), "choices": [choice], **usage}
    if options.get("include_usage"):
        yield {**_fixed(asked), "choices": [], "usage": _usage(sum(map(len, prompts)), sampled)}


def _fixed(asked: dict[str, Any]) -> dict[str, Any]:
    return {"id": "cmpl-fake", "object": "text_completion", "created": 1, "model": asked.get("model", "tiny")}


def _logprobs(reply: Reply, ids: Sequence[int], asked: dict[str, Any]) -> dict[str, Any] | None:
    """Of each id, and of itself as the only alternative."""
    if asked.get("logprobs") is None or "logprobs" in reply.silent:
        return None
    told = ids[: len(ids) - reply.logprobs_short]
    tokens = [
        f"token_id:{token}" if asked.get("return_tokens_as_token_ids") else str(token) for token in told
    ]
    values = [-token / 8 for token in told]
    return {
        "text_offset": [0] * len(told),
        "token_logprobs": values,
        "tokens": tokens,
        "top_logprobs": [{token: value} for token, value in zip(tokens, values, strict=True)],
    }


def _usage(prompt: int, sampled: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "total_tokens": prompt + sampled, "completion_tokens": sampled}
