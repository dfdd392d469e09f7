"""The official SDK parses every answer: sync and async, whole, as events, and by its streaming helpers."""

from typing import Any

import anthropic
import pytest
from anthropic.types import Message

from tests.support.message_shapes import SHAPES, Shape
from tests.support.utils import Pair

every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def _kwargs(shape: Shape) -> dict[str, Any]:
    # the SDK warns that the thinking of some models is deprecated, by their names
    return {"model": "tiny", "max_tokens": 2048, **shape.fields, "messages": shape.messages}


@pytest.fixture
def sync(pair: Pair) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=str(pair.client.base_url), api_key="any", max_retries=0)


def _check(message: Message, shape: Shape) -> None:
    assert tuple(block.type for block in message.content) == shape.blocks
    assert message.stop_reason == shape.stop_reason
    assert (message.type, message.role, message.id[:4]) == ("message", "assistant", "msg_")
    assert message.model == shape.fields.get("model", "tiny")
    usage = message.usage
    assert usage.input_tokens > 0 and usage.output_tokens == len(shape.reply.ids)
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (0, 0)
    sampled = shape.reply.message
    for block in message.content:
        match block.type:
            case "tool_use":
                assert block.input == {"where": "up"} and block.id.startswith("call_")
            case "thinking":
                assert block.thinking == sampled["reasoning"] and block.signature
            case "text":
                assert (
                    block.text == (sampled.get("content") or "hello"[: len(shape.reply.ids)])
                    or not block.text
                )


@every_shape
def test_create(pair: Pair, sync: anthropic.Anthropic, shape: Shape) -> None:
    pair.fake.replies.append(shape.reply)
    message = sync.messages.create(**_kwargs(shape))
    _check(message, shape)
    assert message._request_id
    assert pair.fake.last().json["max_tokens"] <= 4096


@every_shape
def test_stream(pair: Pair, sync: anthropic.Anthropic, shape: Shape) -> None:
    pair.fake.replies.append(shape.reply)
    with sync.messages.stream(**_kwargs(shape)) as stream:
        _check(stream.get_final_message(), shape)


async def test_the_async_client(pair: Pair) -> None:
    shape, url = SHAPES["thinking and a call"], str(pair.client.base_url)
    async with anthropic.AsyncAnthropic(base_url=url, auth_token="any", max_retries=0) as client:
        pair.fake.replies.extend([shape.reply] * 2)
        _check(await client.messages.create(**_kwargs(shape)), shape)
        async with client.messages.stream(**_kwargs(shape)) as stream:
            texts = [text async for text in stream.text_stream]
            _check(await stream.get_final_message(), shape)
    assert "".join(texts) == "Ah."
