"""The parts of input items as the parts of chat messages."""

from typing import Any

from proxy.errors import BadRequest

Item = dict[str, Any]
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def text_field(item: Item, name: str, at: str) -> str:
    """A field that must be a string. Raises BadRequest."""
    value = item.get(name)
    if not isinstance(value, str):
        raise BadRequest(f"`{at}.{name}` must be a string", param=f"{at}.{name}")
    return value


def content_of(content: object, at: str) -> str | list[Item]:
    """What a user, the system or a tool says, as the content of a chat message.

    Args:
        at: path of the content in the request, for error messages.

    Raises:
        BadRequest: it is neither a string nor a list of texts, images and sounds.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"`{at}` must be a string or a list of parts", param=at)
    return [_part(part, f"{at}[{index}]") for index, part in enumerate(content)]


def joined_text(parts: object, at: str) -> str:
    """The texts of a list of parts, joined as the SDKs join them.

    Raises:
        BadRequest: it is not a list of texts.
    """
    if isinstance(parts, str):
        return parts
    if not isinstance(parts, list):
        raise BadRequest(f"`{at}` must be a string or a list of parts", param=at)
    return "".join(_text(part, f"{at}[{index}]") for index, part in enumerate(parts))


def kind_of(part: object, at: str) -> str:
    """The type of a part. Raises BadRequest."""
    if not isinstance(part, dict):
        raise BadRequest(f"`{at}` must be an object", param=at)
    return text_field(part, "type", at)


def _text(part: object, at: str) -> str:
    if kind_of(part, at) not in _TEXTS:
        raise BadRequest(
            f"`{at}.type` is `{kind_of(part, at)}`, and only texts are possible here", param=f"{at}.type"
        )
    assert isinstance(part, dict)
    return text_field(part, "text", at)


def _part(part: object, at: str) -> Item:
    kind = kind_of(part, at)
    assert isinstance(part, dict)
    if kind in _TEXTS:
        return {"type": "text", "text": text_field(part, "text", at)}
    if kind == "input_image":
        return _image(part, at)
    if kind == "input_audio" and isinstance(part.get("input_audio"), dict):
        return {"type": "input_audio", "input_audio": part["input_audio"]}
    raise BadRequest(
        f"`{at}.type` is `{kind}`: this server takes `input_text`, `input_image` and `input_audio`",
        param=f"{at}.type",
    )


def _image(part: Item, at: str) -> Item:
    if part.get("image_url") is None:
        raise BadRequest(
            f"`{at}` names a file: this server keeps none, send `image_url` (a data URL or a web address)",
            param=f"{at}.image_url",
        )
    url: Item = {"url": text_field(part, "image_url", at)}
    if part.get("detail") is not None:
        url["detail"] = text_field(part, "detail", at)
    return {"type": "image_url", "image_url": url}
