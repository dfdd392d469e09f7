"""Conversations of Anthropic's clients stay exact: prompts begin with the ids read and sampled before."""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message

from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.message_shapes import SHAPES, Shape, user
from tests.support.talk import sent_ids
from tests.support.tiny_model import END, make_tiny_model
from tests.support.utils import EVERY_SPELLING, Pair, run_proxy

Fields = dict[str, Any]
_SPLIT = (74, 71, 78, 78, 81, END)
"""Of "hello", an id for each letter: a tokenizer gives three."""
_CACHED = {"cache_control": {"type": "ephemeral"}}
_LOOK: Fields = {"name": "look", "input_schema": {"type": "object", "properties": {}}}
_SYSTEM_REFUSED = """\
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}
{{- '<|im_start|>' + message.role + '\n' + (message.content or '') + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


@dataclass
class Talk:
    """A conversation as the SDK holds it."""

    fake: FakeVllm
    client: anthropic.Anthropic
    messages: list[Fields] = field(default_factory=list)
    fields: Fields = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)
    """Prompt and completion of the last turn."""
    headers: httpx.Headers = field(default_factory=httpx.Headers)

    def ask(
        self, *new: Fields, reply: Reply | None = None, stream: bool = True, exact: bool = True
    ) -> list[Any]:
        """Say something; the prompt must begin with `ids`. Returns the content of the answer."""
        script = reply or Reply(_SPLIT)
        self.messages += new
        self.fake.replies.append(script)
        kwargs: Fields = {"model": "tiny", "max_tokens": 900, **self.fields, "messages": self.messages}
        if stream:
            with self.client.messages.stream(**kwargs) as events:
                message: Any = events.get_final_message()
                self.headers = httpx.Headers(dict(events.response.headers))
        else:
            raw = self.client.messages.with_raw_response.create(**kwargs)
            message, self.headers = raw.parse(), httpx.Headers(dict(raw.headers))
        sent = sent_ids(self.fake)
        if self.ids and exact:
            assert sent is not None, self.headers
            assert sent[: len(self.ids)] == self.ids
            assert self.headers["x-prompt-source"] == "extended"
        self.ids = [*(sent or []), *script.ids] if sent or not exact else []
        content = [block.to_dict() for block in message.content]
        self.messages.append({"role": "assistant", "content": content})
        return content


@pytest.fixture
def talk(pair: Pair) -> Talk:
    client = anthropic.Anthropic(base_url=str(pair.client.base_url), api_key="x", max_retries=0)
    return Talk(pair.fake, client)


def _first(talk: Talk, *more: Fields, **asked: Any) -> list[Any]:
    """The first turn, which the engine renders: its ids are those of the record."""
    content = talk.ask(user(f"Hi {secrets.token_hex(6)}"), *more, exact=False, **asked)
    assert talk.headers["x-prompt-source"] == "rendered"
    url = f"{str(talk.client.base_url).rstrip('/')}/v1/sessions/{talk.headers['x-session-id']}"
    [turn] = httpx.get(url, params={"ids": "true"}, trust_env=False).json()["turns"]
    talk.ids = [*turn["appended_ids"], *turn["completion_ids"]]
    return content


def _calling(*identities: str, text: str | None = "Well.") -> Reply:
    calls = [
        {"id": identity, "type": "function", "function": {"name": "look", "arguments": '{"b": 1, "a": "é"}'}}
        for identity in identities
    ]
    message = {"content": text, "reasoning": "I look.", "tool_calls": calls}
    return Reply(_SPLIT, message=message, finish="tool_calls")


def _result(identity: str, content: Any = "3", **more: Any) -> Fields:
    return {"type": "tool_result", "tool_use_id": identity, "content": content, **more}


@EVERY_SPELLING
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_four_turns_with_thinking_and_tools(talk: Talk, stream: bool) -> None:
    talk.fields = {"system": [{"type": "text", "text": "Be brief.", **_CACHED}], "tools": [_LOOK]}
    own = [f"functions.look:{index}" for index in range(3)]
    content = _first(talk, reply=_calling(*own[:2]), stream=stream)
    one, two = (block["id"] for block in content[2:])
    assert [block["type"] for block in content] == ["thinking", "text", "tool_use", "tool_use"]
    more = {"type": "text", "text": "Go on."}
    results = user(_result(two), more, _result(one, is_error=True))
    content = talk.ask(results, reply=_calling(own[2], text=None), stream=stream)
    three = content[-1]["id"]
    talk.ask(
        user(_result(three, [{"type": "text", "text": "x"}])),
        reply=Reply(_SPLIT, message={"reasoning": "so"}),
    )
    talk.ask(user("Thanks"), stream=not stream)


def test_text_after_a_call_is_a_block_of_its_own(talk: Talk) -> None:
    called = {"id": "look:0", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    talk.fields["tools"] = [_LOOK]
    content = _first(talk, reply=Reply(_SPLIT, message={"tool_calls": [called]}, finish="tool_calls"))
    assert [block["type"] for block in content] == ["text", "tool_use", "text"]
    talk.ask(user(_result(content[1]["id"])))
    assert talk.fake.last().json["messages"][-1]["tool_call_id"] == "look:0"


@pytest.mark.parametrize(
    "sampled, sent, why",
    [('{"a": 1.0, "b": 1e3}', {"a": 1, "b": 1000}, None), ("null", {}, "call_repaired"),
     ("[1]", {}, "call_repaired"), ('{"a": "b', {}, "call_repaired")],
)  # fmt: skip
def test_arguments_that_clients_write_anew(talk: Talk, sampled: str, sent: Fields, why: str | None) -> None:
    """Clients hold objects: in JavaScript 1.0 is 1, and what is no object arrives as an empty one."""
    talk.fields["tools"] = [_LOOK]
    reply = _calling(f"toolu_{secrets.token_hex(8)}", text=None)
    reply.message["tool_calls"][0]["function"]["arguments"] = sampled
    content = _first(talk, reply=reply, stream=False)
    talk.messages[-1]["content"][-1]["input"] = sent
    talk.ask(user(_result(content[-1]["id"])))
    assert talk.headers.get("x-prompt-reason") == why


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A model whose template refuses system messages after the first message."""
    model = make_tiny_model(Path(tmp_path_factory.mktemp("strict")), _SYSTEM_REFUSED)
    with FakeVllm(model) as fake, run_proxy([fake], store="memory:") as client:
        yield Pair(fake, client)


def test_system_messages_join_the_users_where_the_template_refuses_them(strict: Pair) -> None:
    client = anthropic.Anthropic(base_url=str(strict.client.base_url), api_key="x", max_retries=0)
    talk = Talk(strict.fake, client, fields={"system": "p"})
    reminder = {"role": "system", "content": "Be kind."}
    _first(talk, reminder)
    talk.ask(user("more"), reminder)
    talk.ask(user("and more"), reminder, user("again"))
    messages = talk.fake.last().json["messages"]
    assert [message["role"] for message in messages] == [
        *("system", *("user", "assistant") * 2, "user", "user")
    ]
    assert messages[0]["content"] == "pBe kind."
    assert [message["content"] for message in messages[-2:]] == ["and more\n\nBe kind.", "again"]


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
