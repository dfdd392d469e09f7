"""A fake vLLM with a model of images and --enable-scale-out: it expands one placeholder for each image.

An image takes one id for each of its 10 pixels of width, between two marks.
"""

import base64
import dataclasses
import io
import json
from typing import Any

from aiohttp import web
from PIL import Image

from tests.support.fake_server import Seen
from tests.support.fake_vllm import FakeVllm, Variant
from tests.support.fake_wire import error_body
from tests.support.tiny_model import SPECIAL_TOKENS, TinyModel

PLACEHOLDER = 0
"""Id of the special token that stands for an image."""
_TEXT = SPECIAL_TOKENS[PLACEHOLDER]
_PIXELS_PER_ID = 10


def picture(color: str, width: int = 20) -> str:
    """An image of one colour as base64."""
    out = io.BytesIO()
    Image.new("RGB", (width, 10), color).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def ids_of_image(url: str) -> list[int]:
    """The ids that an image takes in a prompt."""
    with Image.open(io.BytesIO(base64.b64decode(url.rpartition(",")[2]))) as image:
        return [10, *[PLACEHOLDER] * (image.width // _PIXELS_PER_ID), 11]


class FakeVision(FakeVllm):
    """An engine that takes images with exact ids."""

    def __init__(self, model: TinyModel, **kwargs: Any) -> None:
        super().__init__(model, Variant.SCALE_OUT, **kwargs)

    def _render(self, body: dict[str, Any]) -> list[int]:
        urls: list[str] = []
        messages = [
            {**message, "content": _as_text(message.get("content"), urls)} for message in body["messages"]
        ]
        prompt, _ = expanded(super()._render({**body, "messages": messages}), urls)
        return prompt

    async def _render_chat(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        answer = await super()._render_chat(request, seen)
        assert isinstance(answer, web.Response)
        urls: list[str] = []
        for message in seen.json["messages"]:
            _as_text(message.get("content"), urls)
        if not urls or answer.status != 200:
            return answer
        rendered = json.loads(answer.body or b"")  # type: ignore[arg-type]
        spans, at = [], 0
        for url in urls:
            ids = ids_of_image(url)
            while rendered["token_ids"][at : at + len(ids)] != ids:
                at += 1
            spans.append({"offset": at, "length": len(ids)})
            at += len(ids)
        rendered["features"] = {"mm_placeholders": {"image": spans}}
        return web.json_response(rendered)

    async def _generate(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        body = seen.json
        urls = [part["url"] for part in body.get("content_parts") or []]
        if not urls:
            return await super()._generate(request, seen)
        prompt, left = expanded(body["token_ids"], urls)
        if left:
            error = error_body("Failed to apply prompt replacement", "BadRequestError", None, 400)
            return web.Response(status=400, body=error, content_type="application/json")
        return await super()._generate(
            request, dataclasses.replace(seen, body=json.dumps({**body, "token_ids": prompt}).encode())
        )


def expanded(prompt: list[int], urls: list[str]) -> tuple[list[int], int]:
    """A prompt with each placeholder replaced by the ids of its image, and how many images are left."""
    left, whole = list(urls), []
    for token in prompt:
        whole += ids_of_image(left.pop(0)) if token == PLACEHOLDER and left else [token]
    return whole, len(left)


def _as_text(content: Any, urls: list[str]) -> Any:
    """Content with a placeholder for each image, whose URL is added to `urls`."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if part["type"] == "image_url":
            urls.append(part["image_url"]["url"])
        texts.append(_TEXT if part["type"] == "image_url" else part["text"])
    return "\n".join(texts)
