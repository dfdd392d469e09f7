"""The images of prompts with ids from the client: where they come from, and where they are in the ids."""

import re
from dataclasses import replace
from typing import Any

import msgspec

from proxy.errors import BadRequest
from proxy.history.images import ImageModel, ImageRef, NotLoadable, place, refs_in
from proxy.history.matcher import AmbiguousImages
from proxy.history.placing import Placer
from proxy.history.plan import ServedModel
from proxy.history.store import session_id
from proxy.history.turn import PromptImage, unpack_ids
from proxy.turn.request import ChatRequest, GivenIds
from tokenization import InvalidIds, ids
from tokenization.placeholders import PlaceholdersDiffer

_split = msgspec.json.Decoder(list[msgspec.Raw]).decode
_parse = msgspec.json.Decoder(dict[str, Any]).decode


async def place_images(
    placer: Placer, request: ChatRequest, given: GivenIds, model: ServedModel
) -> tuple[GivenIds, tuple[PromptImage, ...]]:
    """The given ids with every image expanded, and where the images are in them.

    Images come from the request's `images`, else from its `messages`, else from the recorded turn of the
    session whose ids the prompt begins with. Each placeholder is expanded exactly once, however it came.

    Raises:
        BadRequest: the images are not those of the placeholders, one is invalid, or the engine takes no
            images together with ids.
    """
    images, placeholder = model.images, model.placeholder
    if images is None and (request.images or request.media):
        raise no_images(request.media[0] if request.media else request.images_field)
    holds_placeholder = (
        placeholder is not None and re.search(rb"[\[,\s]%d[\],\s]" % placeholder, given.raw) is not None
    )
    if not request.images and not holds_placeholder:
        return given, ()
    if images is None:
        # without its images, the engine would read the placeholders as text
        raise no_images(given.field)
    if request.images is not None:
        field = request.images_field
        refs = [ImageRef(f"{field}[{index}]", url) for index, url in enumerate(request.images)]
    elif "messages" in request.media:
        field = "messages"
        refs = _history_refs(request)
    else:
        return given, await _recorded_images(placer, request, given, images)
    try:
        loaded = await placer.images.load(refs, images, field, request.tenant)
        expanded, prompt_images = place(_unpack(given), images, loaded, 0)
    except NotLoadable as error:
        raise BadRequest(str(error), param=field, code="image_not_loaded") from error
    except PlaceholdersDiffer as error:
        raise BadRequest(f"`{given.field}` and `{field}`: {error}", param=field) from error
    return replace(given, raw=ids.dump(expanded), count=len(expanded)), tuple(prompt_images)


def _unpack(given: GivenIds) -> list[int]:
    """The given ids as integers. Raises BadRequest if one has more than 32 bits."""
    try:
        return unpack_ids(ids.pack(given.raw))
    except InvalidIds as error:
        raise BadRequest(f"`{given.field}` {error}", param=given.field) from error


def no_images(field: str) -> BadRequest:
    """The error for images next to ids on an engine that does not take them so."""
    return BadRequest(
        f"`{field}` holds images, and this engine takes no images together with prompt ids: serve a model of "
        "images whose chat template takes parts, start vLLM with --enable-scale-out, and send no `stop` "
        "strings",
        param=field,
        code="no_images",
    )


def _history_refs(request: ChatRequest) -> list[ImageRef]:
    messages = objects(request.messages, "messages")
    new = len(_split(request.append)) if request.append else 0
    try:
        return refs_in(messages[: len(messages) - new], "messages")
    except NotLoadable as error:
        raise BadRequest(str(error), param="messages", code="image_not_loaded") from error


async def _recorded_images(
    placer: Placer, request: ChatRequest, given: GivenIds, model: ImageModel
) -> tuple[PromptImage, ...]:
    """The images of the recorded turn that given ids begin with. Raises BadRequest."""
    turn = None
    if request.session is not None:
        rollout = session_id(request.tenant, request.session.name)
        try:
            turn = await placer.longest_prefix(ids.compact(given.raw), rollout)
        except AmbiguousImages as error:
            raise BadRequest(
                f"recorded turns with the ids of `{given.field}` hold different images: send those of the "
                f"prompt in `{request.images_field}`, or send the conversation as `messages`",
                param=request.images_field,
                code="images_missing",
            ) from error
    recorded = turn.images if turn is not None else ()
    outside = _unpack(given)
    for image in reversed(recorded):
        del outside[image.offset : image.offset + image.length]
    if model.placeholder in outside:
        raise BadRequest(
            f"`{given.field}` holds the placeholder of images, {model.placeholder}, and its images are not "
            f"recorded: send them in `{request.images_field}`, or send the conversation as `messages`",
            param=request.images_field,
            code="images_missing",
        )
    return recorded


def objects(raw: bytes, field: str) -> list[dict[str, Any]]:
    """A JSON array of objects. Raises BadRequest, naming `field`."""
    try:
        # one by one, because parsing holds the GIL
        return [_parse(each) for each in _split(raw)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"`{field}`: {error}", param=field) from error
