"""What an engine takes for media. It renders messages that hold some, and ignores prompt ids beside them."""

from collections.abc import Mapping

from tokenization.messages import TEXT_PARTS

_TEXT_PARTS = TEXT_PARTS | {"tool_reference"}
_MEDIA_KEYS = frozenset(
    {
        *("audio_embeds", "audio_url", "input_audio", "prompt_embeds", "video_embeds", "video_url"),
        *("image_embeds", "image_pil", "image_url", "input_image"),
    }
)
"""Keys by which vLLM takes a part for media whatever its type."""


def media_kind(content: object) -> str | None:
    """The type of the first part of a message's content that is no text, or None if all of it is."""
    if not isinstance(content, list):
        return None
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        media = _MEDIA_KEYS.intersection(part) if isinstance(part, Mapping) else ()
        if media or not isinstance(kind, str) or kind not in _TEXT_PARTS:
            return repr(kind)
    return None
