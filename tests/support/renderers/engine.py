"""vLLM's own renderers in this process: the routes of `vllm launch render`, with no weights and no port."""

import asyncio
import os
import sys
from typing import Any

import httpx

from tests.support.renderers.models import RendererModel
from tests.support.renderers.pieces import Pieces
from tests.support.renderers.stand_in import ids_of

Body = dict[str, Any]
RENDER = "/v1/chat/completions/render"


class Refused(Exception):
    """The engine does not render this conversation; the message has its reason."""


class EngineRenderer:
    """The real renderer of one model. Takes 10 s of a core and 0.7 GB, most of it for the first one."""

    def __init__(self, model: RendererModel, *flags: str) -> None:
        folder = model.ensure()
        os.environ.update({"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **model.environment})
        if model.package:
            sys.path.insert(0, str(model.modules))
        self._runner = asyncio.Runner()
        self.app = self._runner.run(_build_app(["--model", str(folder), *model.flags, *flags]))
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self._http = httpx.AsyncClient(transport=transport, base_url="http://engine")

    def post(self, path: str, body: Body) -> Any:
        """The answer of a route. Raises Refused."""
        response = self._runner.run(self._http.post(path, json=body))
        if response.status_code != 200:
            raise Refused(f"{response.status_code}: {response.json()['error']['message']}")
        return response.json()

    def consumed(self, body: Body) -> list[int]:
        """The ids that the engine consumes for a chat request."""
        ids: list[int] = self.post(RENDER, body)["token_ids"]
        return ids

    @property
    def tokenizer(self) -> Any:
        """The engine's tokenizer."""
        return self.app.state.online_renderer.renderer.get_tokenizer()

    def ids_of(self, pieces: Pieces) -> list[int]:
        """The ids of a layout's rendering."""
        vocabulary = self.tokenizer.get_vocab()
        return ids_of(
            pieces,
            vocabulary.__getitem__,
            lambda text: list(self.tokenizer.encode(text, add_special_tokens=False)),
        )

    def text(self, ids: list[int]) -> str:
        """The text of ids, special tokens included."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


async def _build_app(arguments: list[str]) -> Any:
    from vllm import AsyncEngineArgs, envs
    from vllm.config import VllmConfig
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.launchers.render.app_state import init_render_app_state
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    validate_parsed_serve_args(parsed)
    engine = AsyncEngineArgs.from_cli_args(parsed)
    envs.VLLM_CPU_KVCACHE_SPACE = 0
    config = VllmConfig(
        model_config=engine.create_model_config(),
        logging_config=engine.create_logging_config(),
        structured_outputs_config=engine.create_structured_outputs_config(),
    )
    app = build_app(parsed, ("render",))
    await init_render_app_state(config, app.state, parsed)
    return app
