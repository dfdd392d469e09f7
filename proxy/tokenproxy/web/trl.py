"""The routes of `trl vllm-serve`, for TRL up to 1.10, whose client calls them; later ones call vLLM's own."""

import asyncio
from dataclasses import replace

import msgspec

from tokenproxy.base.errors import EngineBroken
from tokenproxy.base.fields import join, parse
from tokenproxy.base.http import Request, Response, json_response
from tokenproxy.engine.protocol import fetch
from tokenproxy.formats.trl import Prompt, TrlAnswer, batch_answer, parse_batch, turn_of
from tokenproxy.record.store_time import store_time
from tokenproxy.turn.serve import serve_turn
from tokenproxy.turn.services import Services
from tokenproxy.web.base import Route, parsed
from tokenproxy.web.parameters import named_session

_AT_ONCE = 256
"""Prompts of one batch that are served at the same time: vLLM's default for `--max-num-seqs`."""


class TrlBatch(Route):
    """A batch of prompts in the format of `trl vllm-serve`; each prompt is one turn."""

    def __init__(self, path: str, prompts: str) -> None:
        """`prompts`: the field that holds the prompts."""
        self.path = path  # type: ignore[misc]
        self.summary = "A batch of prompts, for TRL up to 1.10"  # type: ignore[misc]
        self._prompts = prompts

    async def answer(self, request: Request, services: Services, /) -> Response:
        """`{"prompt_ids", "completion_ids", "logprobs", "logprob_token_ids"}`."""
        session = await named_session(request, services)
        batch = await parsed(request, services, lambda: parse_batch(parse(request.body), self._prompts))

        answers = [TrlAnswer(logprobs=batch.visible.logprobs) for _ in batch.prompts]
        gate = asyncio.Semaphore(_AT_ONCE)

        async def serve(prompt: Prompt, answer: TrlAnswer) -> None:
            async with gate:
                if prompt.is_text:
                    prompt = await _tokenise(prompt, request, services)
                turn = turn_of(prompt, batch, request, session)
                with store_time(self.store_seconds or services.settings.store_timeout_s):
                    response = await serve_turn(turn, services, answer)
                if response.status >= 400:
                    raise _Refused(response)

        try:
            async with asyncio.TaskGroup() as group:  # the first failure cancels the others
                for prompt, answer in zip(batch.prompts, answers, strict=True):
                    group.create_task(serve(prompt, answer))
        except BaseExceptionGroup as failures:
            first = failures.exceptions[0]
            if isinstance(first, _Refused):
                return first.response
            raise first from None
        return json_response(batch_answer(answers))


class _Refused(Exception):
    """The engine refused one prompt; its response holds the reason."""

    def __init__(self, response: Response) -> None:
        super().__init__(f"the engine responded {response.status}")
        self.response = response


async def _tokenise(prompt: Prompt, request: Request, services: Services) -> Prompt:
    """A text prompt as ids, with the special tokens that vLLM adds to text. Raises EngineBroken."""
    headers = [pair for pair in request.headers if pair[0] != b"accept-encoding"]
    body = join({"prompt": msgspec.Raw(prompt.raw)})
    call = Request("POST", "/tokenize", headers, body, repeatable=True)
    status, tokenised = await services.fleet.ask(lambda replica: fetch(replica.engine, call))
    try:
        tokens = msgspec.json.decode(tokenised, type=dict[str, msgspec.Raw])["tokens"]
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError) as error:
        raise EngineBroken(f"/tokenize returned status {status} and no tokens") from error
    return replace(prompt, raw=bytes(tokens))
