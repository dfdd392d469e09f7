"""The routes of `trl vllm-serve`, for TRL up to 1.10, whose client calls them; later ones call vLLM's own."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import msgspec

from proxy.dialects.trl import Prompt, TrlAnswer, parse_batch, turn_of
from proxy.engine.protocol import fetch
from proxy.errors import ApiError, EngineBroken
from proxy.fields import join, parse
from proxy.history.store_time import store_time
from proxy.http import JSON_HEADERS, BytesResponse, Request, Response
from proxy.routes.base import Route, parsed
from proxy.routes.session_names import session_fields
from proxy.turn.serve import serve_turn
from proxy.turn.services import Services

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
        session = await session_fields(request, services)
        batch = await parsed(request, services, lambda: parse_batch(parse(request.body), self._prompts))

        async def serve(prompt: Prompt) -> Response:
            if prompt.is_text:
                prompt = await _tokenise(prompt, request, services)
            turn = turn_of(prompt, batch, request, session)
            with store_time(self.store_seconds or services.store_timeout_s):
                return await serve_turn(turn, services)

        responses = Responses(batch.prompts, serve)
        refused = await responses.collect()
        if refused is not None:
            return refused

        def answer() -> bytes:
            whole = TrlAnswer(logprobs=batch.visible.logprobs)
            for body in responses.bodies:
                whole.add(body)
            return whole.body()

        return BytesResponse(200, list(JSON_HEADERS), await services.in_thread(answer))


class Responses:
    """The responses to a batch. The first failure ends it: the requests that still run are cancelled."""

    def __init__(self, batch: Sequence[Prompt], serve: Callable[[Prompt], Awaitable[Response]]) -> None:
        self.bodies = [b""] * len(batch)
        """Those of the responses, in the order of the batch."""
        self._waiting = iter(enumerate(batch))
        self._serve = serve
        self._failed: ApiError | Response | None = None

    async def collect(self) -> Response | None:
        """Serve the whole batch; returns the engine's error if one of the requests got one.

        Raises:
            ApiError: one of them cannot be served.
        """
        workers = [asyncio.create_task(self._work()) for _ in range(min(_AT_ONCE, len(self.bodies)))]
        try:
            while workers and self._failed is None:
                done, pending = await asyncio.wait(workers, return_when=asyncio.FIRST_COMPLETED)
                workers = list(pending)
                for task in done:
                    task.result()
        finally:
            for task in workers:
                task.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        if isinstance(self._failed, ApiError):
            raise self._failed
        return self._failed

    async def _work(self) -> None:
        for index, item in self._waiting:
            try:
                response = await self._serve(item)
            except ApiError as error:
                self._failed = self._failed or error
                return
            body = await _read(response)
            if response.status >= 400:
                self._failed = self._failed or BytesResponse(response.status, response.headers, body)
                return
            self.bodies[index] = body


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


async def _read(response: Response) -> bytes:
    try:
        return await response.read()
    finally:
        await response.aclose()


def trl_routes() -> list[Route]:
    """An instance of each of these routes."""
    return [TrlBatch("/generate", "prompts"), TrlBatch("/chat", "messages")]
