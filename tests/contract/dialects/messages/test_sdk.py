"""The official SDK parses every answer: sync and async, whole, as events, and by its streaming helpers."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import anthropic
import pytest
from anthropic.types import Message

from tests.support.message_shapes import SHAPES, Shape
from tests.support.utils import Pair

pytestmark = [pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)]


def _kwargs(shape: Shape) -> dict[str, Any]:
    # the SDK warns that the thinking of some models is deprecated, by their names
    return {"model": "tiny", "max_tokens": 2048, **shape.fields, "messages": shape.messages}


@pytest.fixture
def sync(pair: Pair) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=str(pair.client.base_url), api_key="any", max_retries=0)


@pytest.fixture
async def unsync(pair: Pair) -> AsyncIterator[anthropic.AsyncAnthropic]:
    url = str(pair.client.base_url)
    async with anthropic.AsyncAnthropic(base_url=url, auth_token="any", max_retries=0) as client:
        yield client


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


def test_create(pair: Pair, sync: anthropic.Anthropic, shape: Shape) -> None:
    pair.fake.replies.append(shape.reply)
    message = sync.messages.create(**_kwargs(shape))
    _check(message, shape)
    assert message._request_id
    assert pair.fake.last().json["max_tokens"] <= 4096


def test_create_stream(pair: Pair, sync: anthropic.Anthropic, shape: Shape) -> None:
    pair.fake.replies.append(shape.reply)
    kinds = [event.type for event in sync.messages.create(**_kwargs(shape), stream=True)]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(shape.blocks)


def test_stream(pair: Pair, sync: anthropic.Anthropic, shape: Shape) -> None:
    pair.fake.replies.append(shape.reply)
    with sync.messages.stream(**_kwargs(shape)) as stream:
        _check(stream.get_final_message(), shape)


async def test_create_async(pair: Pair, unsync: anthropic.AsyncAnthropic, shape: Shape) -> None:
    pair.fake.replies.append(shape.reply)
    _check(await unsync.messages.create(**_kwargs(shape)), shape)


async def test_stream_async(pair: Pair, unsync: anthropic.AsyncAnthropic, shape: Shape) -> None:
    pair.fake.replies.append(shape.reply)
    async with unsync.messages.stream(**_kwargs(shape)) as stream:
        texts = [text async for text in stream.text_stream]
        message = await stream.get_final_message()
    _check(message, shape)
    assert "".join(texts) == "".join(block.text for block in message.content if block.type == "text")


@pytest.mark.parametrize("helper", [False, True], ids=["create", "stream"])
def test_beta(pair: Pair, sync: anthropic.Anthropic, shape: Shape, helper: bool) -> None:
    pair.fake.replies.append(shape.reply)
    call: Callable[..., Any] = sync.beta.messages.stream if helper else sync.beta.messages.create
    if helper:
        with call(**_kwargs(shape)) as stream:
            message = stream.get_final_message()
    else:
        message = call(**_kwargs(shape))
    assert tuple(block.type for block in message.content) == shape.blocks
    assert pair.fake.last().path == "/v1/chat/completions"


def test_count_tokens(pair: Pair, sync: anthropic.Anthropic, shape: Shape) -> None:
    """Equal to the number of ids that the same request has."""
    left_out = ("temperature", "top_p", "top_k", "stop_sequences", "metadata", "service_tier", "max_tokens")
    kwargs = {name: value for name, value in _kwargs(shape).items() if name not in left_out}
    counted = sync.messages.count_tokens(**kwargs).input_tokens
    pair.fake.replies.append(shape.reply)
    assert sync.messages.create(**_kwargs(shape)).usage.input_tokens == counted
