import json
from typing import Any

import msgspec
import pytest

from proxy.history.conversation import Asked, Conversation, Digester, Setting
from tokenization import InvalidMessages

_TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind"},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "hello", "reasoning": "so"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "end"},
]


def read(messages: object, setting: Setting | None = None, model: str = "m") -> Conversation:
    """A conversation as a request brings it."""
    asked = Asked(json.dumps(messages).encode(), setting or Setting(), None, None)
    return Digester().read(asked, model)


def test_where_turns_may_end() -> None:
    assert read(_TALK).ends == [5, 4, 2]
    assert read(_TALK[:3]).ends == []
    assert read(_TALK[:6]).ends == [4, 2]
    assert read([]).ends == []
    assert [read(_TALK[:n]).ends_with_assistant for n in range(8)] == [n in (3, 5, 6) for n in range(8)]


def test_a_beginning_has_the_digests_of_the_whole() -> None:
    whole = read(_TALK)
    for n in range(len(_TALK)):
        part = read(_TALK[:n])
        assert (part.loose, part.strict, part.content) == (
            whole.loose[:n],
            whole.strict[:n],
            whole.content[:n],
        )


def test_what_stands_beside_the_messages_counts_except_for_the_content() -> None:
    others = [
        read(_TALK, Setting(tools=b'[{"a": 1}]')),
        read(_TALK, Setting(template_kwargs=b'{"a": 1}')),
        read(_TALK, model="n"),
        # lengths, not only bytes, tell parts apart
        read(_TALK, Setting(tools=b"[{}]", template_kwargs=b"{}")),
        read(_TALK),
    ]
    assert len({other.loose[0] for other in others}) == len(others)
    assert len({other.content[-1] for other in others}) == 1
    assert read(_TALK, Setting(add_generation_prompt=False)).loose == read(_TALK).loose
    assert read(_TALK, Setting(b"[]", b"{}")).loose == read(_TALK).loose


def test_messages_come_back_as_they_were_spelled() -> None:
    raw = b'[ {"role":"user", "content" : "\\u00e9"} ,{"role":"user","content":"x"}]'
    conversation = Digester().read(Asked(raw, Setting(), None, None), "m")
    assert conversation.json(0) == b'[{"role":"user", "content" : "\\u00e9"},{"role":"user","content":"x"}]'
    assert conversation.json(2) == b"[]"
    assert conversation.parse(1, 2) == [{"role": "user", "content": "x"}]


def test_reasonings_of_a_part() -> None:
    conversation = read(_TALK)
    first, *others = conversation.reasonings(0, 7)
    assert first
    assert others == [b"", b""]
    assert conversation.reasonings(3, 5) == [b""]


def test_a_digester_remembers_messages_and_not_where_they_stood() -> None:
    digester = Digester(remembered=2)
    for messages in (_TALK, _TALK[::-1], _TALK * 3):
        asked = Asked(json.dumps(messages).encode(), Setting(), None, None)
        assert digester.read(asked, "m").strict == read(messages).strict


@pytest.mark.parametrize("media", ["image_url", "input_audio", "video_url", "other"])
def test_media_are_seen_in_any_message(media: str) -> None:
    part = {"type": media, media: {"url": "data:,"}}
    assert read([*_TALK, {"role": "tool", "content": [{"type": "text", "text": "a"}, part]}, *_TALK]).media
    assert not read(_TALK).media


@pytest.mark.parametrize("messages", ["Hi", {"role": "user"}, 5, None, ["Hi"], [None], [[]]])
def test_messages_that_are_none(messages: object) -> None:
    with pytest.raises(msgspec.DecodeError):
        read(messages)


@pytest.mark.parametrize("message", [{}, {"role": 5}, {"role": "user", "content": 5}])
def test_messages_that_nobody_can_mean(message: object) -> None:
    with pytest.raises(InvalidMessages):
        read([message])
