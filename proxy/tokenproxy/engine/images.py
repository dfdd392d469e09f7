"""Exact prompts that hold images, for engines with vLLM's render and generate routes.

The chat route ignores given ids if messages hold images (vLLM 0.32). The generate route takes ids with one
placeholder for each image, and the images next to them (`content_parts`); it expands each placeholder to the
ids of its image and returns the whole prompt. The render route tells the ids of an image beforehand.
"""

import base64
import logging
import struct
import zlib
from collections import Counter
from collections.abc import Sequence

import msgspec

from chat_tokenizer.cache import BoundedCache
from tokenproxy.base.errors import EngineBroken
from tokenproxy.base.images import Image, InvalidImage
from tokenproxy.engine.derender import GENERATE_PATH
from tokenproxy.engine.protocol import Engine, error_text, examine
from tokenproxy.engine.token_in import RENDER_PATH, json_request

log = logging.getLogger("tokenproxy")

_REMEMBERED = 4096
"""Images whose ids are remembered: some hundred bytes to some kilobytes each."""
_PROBE_PIXELS = 64
"""Width and height of the image with which an engine is probed."""


class _Range(msgspec.Struct):
    offset: int
    length: int


class _Features(msgspec.Struct):
    mm_placeholders: dict[str, list[_Range]]


class _Rendered(msgspec.Struct):
    token_ids: list[int]
    features: _Features | None = None


class _Generated(msgspec.Struct):
    prompt_token_ids: list[int] | None = None


_decode_rendered = msgspec.json.Decoder(_Rendered).decode
_decode_generated = msgspec.json.Decoder(_Generated).decode


class EngineImages:
    """How one engine takes images with exact ids."""

    def __init__(self, engine: Engine, placeholder: int, probe_count: int) -> None:
        """Images that an engine takes.

        Args:
            placeholder: the id that stands for an image before it is expanded.
            probe_count: number of ids that the image of `find_images` takes.
        """
        self.placeholder = placeholder
        self.probe_count = probe_count
        self._engine = engine
        self._ids: BoundedCache[str, tuple[int, ...]] = BoundedCache(_REMEMBERED)

    async def ids_of(self, image: Image) -> Sequence[int]:
        """The ids that an image takes in a prompt. They are remembered.

        Raises:
            InvalidImage: the engine's processor refuses the image.
            ApiError: the engine does not respond.
        """
        if (known := self._ids.get(image.digest)) is not None:
            return known
        status, body = await examine(self._engine, json_request(RENDER_PATH, _render_request(image.url)))
        if status in (400, 413, 422):
            raise InvalidImage(f"the engine refuses it: {error_text(body)}")
        rendered = _read_rendered(body) if status == 200 else None
        if rendered is None:
            raise EngineBroken(
                f"{RENDER_PATH} returned status {status} for an image, or no placeholder of it"
            )
        self._ids.put(image.digest, rendered[1])
        return rendered[1]


async def find_images(engine: Engine) -> EngineImages | None:
    """Find out whether an engine takes images with exact ids, and by which placeholder.

    The ids of a rendered image hold the placeholder, mostly as the most frequent one: each is tried in the
    image's place until the engine expands it to the rendered prompt.

    Returns:
        None if the model takes no images, or the engine has no render and generate routes.

    Raises:
        ApiError: the engine does not respond.
    """
    url = probe_image()
    status, body = await examine(engine, json_request(RENDER_PATH, _render_request(url)))
    found = _read_rendered(body) if status == 200 else None
    if found is None:
        return None
    prompt, span = found
    start = _index(prompt, span)
    for placeholder, _ in Counter(span).most_common():
        single = [*prompt[:start], placeholder, *prompt[start + len(span) :]]
        request = {
            "token_ids": single,
            "content_parts": [{"type": "image_url", "url": url}],
            "sampling_params": {"max_tokens": 1},
            "return_token_ids": True,
        }
        status, body = await examine(engine, json_request(GENERATE_PATH, request))
        if status == 200 and _expanded(body) == prompt:
            return EngineImages(engine, placeholder, len(span))
    log.warning("%s takes images, but it was not found out how to send one with exact ids", engine.name)
    return None


def probe_image() -> str:
    """A small image as a data URL: PNG, grey."""
    row = b"\x00" + b"\x80" * _PROBE_PIXELS
    header = struct.pack(">IIBBBBB", _PROBE_PIXELS, _PROBE_PIXELS, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(row * _PROBE_PIXELS)), (b"IEND", b""))
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _render_request(url: str) -> dict[str, object]:
    content = [{"type": "image_url", "image_url": {"url": url}}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1}


def _read_rendered(body: bytes) -> tuple[list[int], tuple[int, ...]] | None:
    """A rendered prompt with one image, and the ids of that image; None if there is not exactly one."""
    try:
        rendered = _decode_rendered(body)
    except msgspec.MsgspecError:
        return None
    ranges = rendered.features.mm_placeholders.get("image", []) if rendered.features else []
    if len(ranges) != 1:
        return None
    end = ranges[0].offset + ranges[0].length
    span = tuple(rendered.token_ids[ranges[0].offset : end])
    return (rendered.token_ids, span) if len(span) == ranges[0].length else None


def _expanded(body: bytes) -> list[int] | None:
    """The prompt in a response of the generate route; None if it holds none."""
    try:
        return _decode_generated(body).prompt_token_ids
    except msgspec.MsgspecError:
        return None


def _index(prompt: list[int], span: tuple[int, ...]) -> int:
    return next(at for at in range(len(prompt)) if tuple(prompt[at : at + len(span)]) == span)
