"""Detect media in messages as vLLM does, because with media it ignores given prompt ids and renders."""

from collections.abc import Mapping

from chat_tokenizer.messages import TEXT_PARTS

_TEXT_PARTS = TEXT_PARTS | {"tool_reference"}
_MEDIA_KEYS = frozenset(
    {
        *("audio_embeds", "audio_url", "input_audio", "prompt_embeds", "video_embeds", "video_url"),
        *("image_embeds", "image_pil", "image_url", "input_image"),
    }
)
"""Keys that make vLLM treat a content part of any `type` as media."""


def media_kind(content: object) -> str | None:
    """The quoted type of the first content part that is not text, like `'image_url'`; None if all is text."""
    if not isinstance(content, list):
        return None
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        media_keys = _MEDIA_KEYS.intersection(part) if isinstance(part, Mapping) else ()
        if media_keys or not isinstance(kind, str) or kind not in _TEXT_PARTS:
            return repr(kind)
    return None
