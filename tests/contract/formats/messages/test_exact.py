"""Conversations of Anthropic's clients stay exact: prompts begin with the ids read and sampled before."""

import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.message_shapes import SHAPES, Shape, user
from tests.support.talk import sent_ids
from tests.support.tiny_model import SPLIT, make_tiny_model
from tests.support.utils import EVERY_SPELLING, Pair, run_proxy

Fields = dict[str, Any]
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
        script = reply or Reply(SPLIT)
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


def _result(identity: str, content: Any = "3", **more: Any) -> Fields:
    return {"type": "tool_result", "tool_use_id": identity, "content": content, **more}


def _calling(*identities: str, text: str | None = "Well.") -> Reply:
    calls = [
        {"id": identity, "type": "function", "function": {"name": "look", "arguments": '{"b": 1, "a": "é"}'}}
        for identity in identities
    ]
    message = {"content": text, "reasoning": "I look.", "tool_calls": calls}
    return Reply(SPLIT, message=message, finish="tool_calls")


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
    result = user(_result(three, [{"type": "text", "text": "x"}]))
    talk.ask(result, reply=Reply(SPLIT, message={"reasoning": "so"}))
    talk.ask(user("Thanks"), stream=not stream)


@pytest.mark.parametrize(
    "sampled, sent, why", [('{"a": 1.0}', {"a": 1}, None), ('{"a": "b', {}, "call_repaired")]
)
def test_arguments_that_clients_write_anew(talk: Talk, sampled: str, sent: Fields, why: str | None) -> None:
    """Clients hold objects: in JavaScript 1.0 is 1, and what is no object arrives as an empty one."""
    talk.fields["tools"] = [_LOOK]
    reply = _calling(f"toolu_{secrets.token_hex(8)}", text=None)
    reply.message["tool_calls"][0]["function"]["arguments"] = sampled
    content = _first(talk, reply=reply, stream=False)
    talk.messages[-1]["content"][-1]["input"] = sent
    talk.ask(user(_result(content[-1]["id"])))
    assert talk.headers.get("x-prompt-reason") == why


def test_system_messages_join_the_users_where_the_template_refuses_them(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, _SYSTEM_REFUSED)
    reminder = {"role": "system", "content": "Be kind."}
    with FakeVllm(model) as fake, run_proxy([fake], store="memory:") as proxy:
        client = anthropic.Anthropic(base_url=str(proxy.base_url), api_key="x", max_retries=0)
        talk = Talk(fake, client, fields={"system": "p"})
        _first(talk, reminder)
        talk.ask(user("more"), reminder)
        talk.ask(user("and more"), reminder, user("again"))
    messages = talk.fake.last().json["messages"]
    assert [message["role"] for message in messages] == ["system", *["user", "assistant"] * 2, "user", "user"]
    assert messages[0]["content"] == "pBe kind."
    assert [message["content"] for message in messages[-2:]] == ["and more\n\nBe kind.", "again"]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes_of_requests(pair: Pair, talk: Talk, shape: Shape) -> None:
    pair.fake.replies.extend([shape.reply] * 2)
    # the SDK warns that the thinking of some models is deprecated, by their names
    kwargs: Fields = {"model": "tiny", "max_tokens": 2048, **shape.fields, "messages": shape.messages}
    with talk.client.messages.stream(**kwargs) as stream:
        streamed = stream.get_final_message()
    for message in (streamed, talk.client.messages.create(**kwargs)):
        assert tuple(block.type for block in message.content) == shape.blocks
        assert message.stop_reason == shape.stop_reason
        assert message.model == shape.fields.get("model", "tiny")
        assert message.usage.input_tokens > 0 and message.usage.output_tokens == len(shape.reply.ids)
        for block in message.content:
            assert block.type != "tool_use" or block.input == {"where": "up"}
            assert block.type != "thinking" or block.thinking == shape.reply.message["reasoning"]
