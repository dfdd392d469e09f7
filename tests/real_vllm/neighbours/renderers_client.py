"""Calls the generate client of `renderers`, unmodified, which verifiers 0.4 and prime-rl use.

    python renderers_client.py URL MODEL SESSION    MODEL: folder of the tokenizer

Three turns. The prompt of each after the first is the ids so far with what the proxy's `/tokenize` appends.
Prints prompt, completion and log-probabilities of each turn, as JSON.
"""

import asyncio
import json
import sys
from typing import Any

import httpx
from openai import AsyncOpenAI
from renderers.client import generate  # type: ignore[import-not-found]
from renderers.default import DefaultRenderer  # type: ignore[import-not-found]
from transformers import AutoTokenizer


async def main(url: str, model: str, session: str) -> list[dict[str, Any]]:
    """The results of the client."""
    renderer = DefaultRenderer(AutoTokenizer.from_pretrained(model))
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "What is 18 * 7?"}]
    prompt: list[int] | None = None
    turns = []
    for _ in range(3):
        turn = await generate(
            client=client,
            renderer=renderer,
            messages=messages,
            model="smollm2",
            prompt_ids=prompt,
            sampling_params={"max_tokens": 8, "temperature": 1.0},
            extra_headers={"X-Session-ID": session},
        )
        turns.append({name: turn[name] for name in ("prompt_ids", "completion_ids", "completion_logprobs")})
        new = {"role": "user", "content": "And so?"}
        messages += [{"role": "assistant", "content": turn["content"]}, new]
        body = {"prompt_ids": turn["prompt_ids"] + turn["completion_ids"], "append_messages": [new]}
        async with httpx.AsyncClient(timeout=60) as http:
            response = await http.post(f"{url}/tokenize", json=body)
        prompt = response.raise_for_status().json()["tokens"]
    return turns


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
