"""A fake engine as a process of its own, so that its sockets do not count to the limit of the tests."""

import asyncio
import resource
import sys
import time
from pathlib import Path

from aiohttp import web

from tests.support.fake_vllm import FakeVllm
from tests.support.tiny_model import TinyModel


class GatedVllm(FakeVllm):
    """Answers no chat completion before a number of them has arrived."""

    def __init__(self, model: TinyModel, count: int) -> None:
        super().__init__(model)
        self._missing = count
        self._all_here = asyncio.Event()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/chat/completions" and not _is_probe(await request.read()):
            self._missing -= 1
            if self._missing <= 0:
                self._all_here.set()
            await self._all_here.wait()
        return await super()._serve(request)


def _is_probe(body: bytes) -> bool:
    """Whether the proxy asks how the engine takes ids."""
    return b'"max_tokens":1,' in body or b'"max_tokens":1}' in body


def main() -> None:
    """`MODEL_FOLDER COUNT`: print the URL and serve until the process is killed."""
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with GatedVllm(TinyModel.load(folder), count) as engine:
        print(engine.url, flush=True)
        while True:
            time.sleep(60)
