"""A fake engine in a process of its own, that can really be killed: `python -m tests.support.engine_process`.

Each generation takes `--seconds`; a stream sends its first event after a sixth of that.
"""

import argparse
import asyncio
import os
from pathlib import Path

from aiohttp import web

from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.tiny_model import END, HI, TinyModel

DEADLY = "This request kills the engine."
"""In a body: the engine dies at once."""
_IDS = (*HI * 2, END)


class MortalEngine(FakeVllm):
    """A fake engine that takes its time. `GET /running` returns how many generations run."""

    seconds = 1.0
    _generations_running = 0

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/running":
            return web.json_response(self._generations_running)
        if request.path != "/v1/chat/completions":
            return await super()._serve(request)
        body = await request.json()
        if DEADLY in body["messages"][-1]["content"]:
            os._exit(1)
        self._generations_running += 1
        try:
            if body.get("max_tokens") != 1 and not body.get("stream"):
                await asyncio.sleep(self.seconds)
            return await super()._serve(request)
        finally:
            self._generations_running -= 1


def main() -> None:
    """Serve until the process is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the tiny model")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    engine = MortalEngine(TinyModel.load(options.model), port=options.port)
    engine.seconds = options.seconds
    events = 1 + len(_IDS)  # the head, and one for each id
    engine.usual = Reply(ids=_IDS, pause_s=options.seconds / events)
    with engine:
        print(engine.port, flush=True)
        engine.join()


if __name__ == "__main__":
    main()
