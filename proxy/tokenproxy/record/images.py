"""Images of prompts: loaded from messages and requests, and placed in the ids of a prompt.

What is recorded of an image is its bytes, a digest of them, and where its ids are in the prompt. Its ids are
those that the model's processor makes of it; they are asked for once, and never inferred.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from chat_tokenizer import ids
from chat_tokenizer.messages import image_url
from chat_tokenizer.placeholders import Span, collapse, expand, find
from tokenproxy.base.errors import BadRequest
from tokenproxy.base.images import Image, InvalidImage, check_image, decode_image
from tokenproxy.base.request import media_kind
from tokenproxy.record.encoders import EncoderPool
from tokenproxy.record.turn import PromptImage

_WEB = ("http://", "https://")
MAX_IMAGES = 1024
"""Of one prompt."""

Fetch = Callable[[str], Awaitable[bytes]]
"""Gets the bytes of an image from the web. Raises InvalidImage."""


class ImageModel(Protocol):
    """A model that takes images, on an engine that takes them with exact ids."""

    placeholder: int
    """The id that stands for an image before it is expanded."""

    async def ids_of(self, image: Image) -> Sequence[int]:
        """The ids that an image takes in a prompt.

        Raises:
            InvalidImage: the model's processor refuses the image.
            ApiError: the engine does not respond.
        """
        ...


class NotLoadable(Exception):
    """A message holds media other than images, or an image that the proxy does not load itself."""


@dataclass(frozen=True, slots=True)
class LoadedImage:
    """An image and the ids that it takes."""

    image: Image
    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image as a request names it."""

    where: str
    """For error messages, for example `messages[2].content[0]`."""
    url: str
    """A URL, or base64."""


def refs_in(messages: Sequence[Mapping[str, Any]], field: str, first: int = 0) -> list[ImageRef]:
    """The images in messages, in their order.

    Args:
        field: the request's field that holds the messages.
        first: the index of the first one in that field.

    Raises:
        NotLoadable: a part is other media, or an image without a URL.
    """
    refs = []
    for index, message in enumerate(messages, first):
        content = message.get("content")
        if media_kind(content) is None or not isinstance(content, list):
            continue
        for number, part in enumerate(content):
            if media_kind([part]) is None:
                continue
            url = image_url(part) if isinstance(part, Mapping) else None
            if url is None:
                raise NotLoadable(f"`{field}[{index}].content[{number}]` is of type {media_kind([part])}")
            refs.append(ImageRef(f"{field}[{index}].content[{number}]", url))
    return refs


@dataclass(frozen=True, slots=True)
class ImageLoader:
    """Loads images, and asks the model for their ids. One per application."""

    encoders: EncoderPool
    fetch: Fetch | None = None
    """For images from the web; None if they are not loaded."""

    async def load(self, refs: Sequence[ImageRef], model: ImageModel, name: str) -> list[LoadedImage]:
        """The images in the field `name` of a request, each with the ids that it takes.

        Raises:
            BadRequest: an image is invalid; the message names it.
            NotLoadable: an image is on the web, and such images are not loaded.
            Overloaded: too many bytes are decoded already.
            ApiError: the engine does not respond.
        """
        if len(refs) > MAX_IMAGES:
            raise BadRequest(
                f"`{name}` holds {len(refs)} images; at most {MAX_IMAGES} are accepted", param=name
            )
        return list(await asyncio.gather(*(self._load(ref, model, name) for ref in refs)))

    async def _load(self, ref: ImageRef, model: ImageModel, name: str) -> LoadedImage:
        try:
            if not ref.url[:8].lower().startswith(_WEB):
                image = await self.encoders.run(lambda: decode_image(ref.url), len(ref.url))
            elif self.fetch is None:
                raise NotLoadable(f"`{ref.where}` is an image on the web (`image_hosts`)")
            else:
                data = await self.fetch(ref.url)
                image = await self.encoders.run(lambda: check_image(data), len(data))
            return LoadedImage(image, await model.ids_of(image))
        except InvalidImage as error:
            raise BadRequest(f"`{ref.where}`: {error}", param=name, code="invalid_image") from error


def expand_images(
    new: Sequence[int], model: ImageModel, images: Sequence[LoadedImage], before: int
) -> tuple[list[int], list[PromptImage]]:
    """Expand the placeholders in ids.

    Args:
        before: number of ids in the prompt before `new`.

    Returns:
        the ids with all images expanded, and where the images are in the whole prompt.

    Raises:
        PlaceholdersDiffer: the ids do not hold one placeholder for each image.
    """
    whole, spans = expand(new, model.placeholder, [loaded.ids for loaded in images])
    return whole, _placed(spans, images, before)


def placed_by_engine(
    prompt: Sequence[int], placeholder: int, images: Sequence[LoadedImage]
) -> list[PromptImage]:
    """Where the images are in a prompt that the engine rendered. Raises PlaceholdersDiffer."""
    return _placed(find(prompt, placeholder, [loaded.ids for loaded in images]), images, 0)


def same_images(some: Sequence[PromptImage], others: Sequence[PromptImage]) -> bool:
    """Whether images are equal and at the same places in the ids of their prompts."""
    places = [[(image.offset, image.length, image.digest) for image in images] for images in (some, others)]
    return places[0] == places[1]


def single_placeholders(prompt: bytes, placeholder: int, images: Sequence[PromptImage]) -> bytes:
    """A prompt, a JSON array of ids, with a single placeholder for each image."""
    whole = msgspec.json.decode(prompt, type=list[int])
    return ids.dump(collapse(whole, placeholder, [Span(image.offset, image.length) for image in images]))


def name_by_digest(messages: bytes, images: Sequence[PromptImage]) -> bytes:
    """Messages, a JSON array, with `image:DIGEST` in place of each image, whose bytes are recorded once.

    Args:
        images: those of the messages, in their order. If they are not, the messages stay as they are.
    """
    parsed = msgspec.json.decode(messages, type=list[dict[str, Any]])
    parts = [
        part
        for message in parsed
        if isinstance(content := message.get("content"), list)
        for part in content
        if isinstance(part, dict) and image_url(part) is not None
    ]
    if len(parts) != len(images):
        return messages
    for part, image in zip(parts, images, strict=True):
        name = f"image:{image.digest}"
        url = part["image_url"]
        part["image_url"] = {**url, "url": name} if isinstance(url, dict) else name
    return msgspec.json.encode(parsed)


def _placed(spans: Sequence[Span], images: Sequence[LoadedImage], before: int) -> list[PromptImage]:
    return [
        PromptImage(
            before + span.offset, span.length, loaded.image.digest, loaded.image.kind, loaded.image.data
        )
        for span, loaded in zip(spans, images, strict=True)
    ]
