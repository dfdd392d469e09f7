"""Every reason that the chat route can give is provoked here, and none is left out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fake_vllm import Canned, FakeVllm, Reply
from tests.support.scraping import Scrape
from tests.support.talk import CHAT, Answered, Message, Talk, call, result, sent_ids, user
from tests.support.tiny_model import CHATML, END, SPLIT
from tokenproxy.record.vocabulary import Reason

_MORE = user("more")
_IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
_ANSWER = Canned(b'{"choices": []}', headers={"content-type": "application/json"})
_NOT_HERE = {
    *("no_ids", "text_prompt", "prefix_given", "no_token_in", "context_overflow", "thinking_dropped"),
    *(
        "store_unavailable",
        "tokenizer_mismatch",
        "tokenizer_unchecked",
        "template_unsupported",
        "call_repaired",
        "call_ids_renamed",
        "integers_rounded",
        "text_dropped",
        "text_stripped",
        "character_cut",
    ),
}
"""Reasons that tests of other files provoke."""


def _second(made: Talk, reply: Reply | None = None, **fields: Any) -> Answered:
    """The second turn of a conversation, requested with other fields."""
    made.ask(reply=reply or Reply(SPLIT))
    return made.ask(_MORE, **fields)


def _canned(made: Talk, body: dict[str, Any]) -> Answered:
    """The answer of an engine that takes anything."""
    made.pair.fake.canned[CHAT] = _ANSWER
    response = made.pair.client.post(CHAT, json=body)
    return Answered(response, sent_ids(made.pair.fake))


def _no_match(talk: Callable[..., Talk]) -> Answered:
    made = talk()
    made.messages.append({"role": "assistant", "content": f"what no model sampled {made.messages}"})
    return made.ask(_MORE)


def _edited(talk: Callable[..., Talk]) -> Answered:
    made = talk()
    made.ask(reply=Reply(SPLIT, message={"content": "no other conversation has an answer like this. " * 3}))
    made.messages[0] = user("something else")
    return made.ask(_MORE)


def _ambiguous(talk: Callable[..., Talk]) -> Answered:
    one, two = talk(), talk()
    two.messages = list(one.messages)
    one.ask(reply=Reply((*SPLIT[:-1], 80, END), message={"content": "same"}))
    two.ask(reply=Reply(SPLIT, message={"content": "same"}))
    return one.ask(_MORE)


def _appended(talk: Callable[..., Talk], new: Message) -> Answered:
    made = talk()
    made.ask(reply=Reply(SPLIT))
    return _canned(made, {"messages": [*made.messages, new]})


_OF_ONE_PROXY: dict[str, Callable[[Callable[..., Talk]], Answered]] = {
    "first_turn": lambda talk: talk().ask(),
    "no_match": _no_match,
    "history_edited": _edited,
    "ambiguous": _ambiguous,
    "tools_changed": lambda talk: _second(talk(), tools=[{"type": "function", "function": {"name": "f"}}]),
    "template_kwargs_changed": lambda talk: _second(talk(), chat_template_kwargs={"a": 1}),
    "model_changed": lambda talk: _second(talk(), model="adapter"),
    "unusable_turn": lambda talk: _second(talk(), reply=Reply(SPLIT, silent=("ids",))),
    "custom_template": lambda talk: _second(talk(), chat_template=CHATML),
    "special_request": lambda talk: _second(talk(), echo=True),
    "ids_given": lambda talk: _second(talk(), kv_transfer_params={"prompt_token_ids": [5, 6]}),
    "template_refused": lambda talk: _appended(talk, {"role": "nobody", "content": "a"}),
    "media": lambda talk: _appended(talk, _IMAGE),
    "ends_with_assistant": lambda talk: _appended(talk, {"role": "assistant", "content": "I"}),
    "unreadable": lambda talk: _canned(talk(), {"messages": "Hi"}),
}


def _counted(client: httpx.Client, source: str, reason: str) -> float:
    return Scrape(client).value("prompts_total", source=source, reason=reason)


@pytest.mark.parametrize("reason", _OF_ONE_PROXY)
def test_reasons(talk: Callable[..., Talk], client: httpx.Client, reason: str) -> None:
    before = {source: _counted(client, source, reason) for source in ("rendered", "extended", "given")}
    answered = _OF_ONE_PROXY[reason](talk)
    source = "given" if reason == "ids_given" else "rendered"
    assert (answered.reason, answered.prompt["source"], answered.prompt["reused"]) == (reason, source, "0")
    assert _counted(client, source, reason) == before[source] + 1


def test_no_tokenizer(own_talk: Callable[..., Talk], tmp_path: Path) -> None:
    assert _second(own_talk(tokenizer=str(tmp_path))).reason == "no_tokenizer"


def test_renderer_unavailable(own_talk: Callable[..., Talk]) -> None:
    template = CHATML.replace("'<|im_start|>' + message.role", "'<|im_start|>' + message.role | upper")

    def renders_otherwise(engine: FakeVllm) -> None:
        engine.chat_template = template

    made = own_talk(renders_otherwise)
    made.ask(reply=Reply(SPLIT))
    assert made.ask(_MORE, reply=Reply(SPLIT)).source == "extended"
    made.pair.fake.canned["/tokenize"] = Canned(b'{"error": "busy"}', 503)
    # of a form that was not rendered before
    assert made.ask({**user("other"), "name": "Bo"}).reason == "renderer_unavailable"


def test_a_default_of_the_tool_in_a_call_is_no_edit(talk: Callable[..., Talk]) -> None:
    """Claude Code sends calls with the defaults that the schema declares; the sampled ids are kept."""
    schema = {"properties": {"city": {}, "metric": {"type": "boolean", "default": True}}}
    made = talk(fields={"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]})
    whole = call(arguments='{"city": "Paris"}')
    made.ask(reply=Reply(SPLIT, message={"content": None, "tool_calls": [whole]}))
    made.messages[-1]["tool_calls"][0]["function"]["arguments"] = '{"metric": true, "city": "Paris"}'
    assert made.follow(result(whole, "17")).reason == ""


def test_rendering_changed(own_talk: Callable[..., Talk]) -> None:
    """A field counts only if this engine prints it: the proxy determined that by test requests."""
    made = own_talk(lambda engine: setattr(engine, "rendered_fields", ("tool_choice",)))
    made.fields = {"tools": [{"type": "function", "function": {"name": "f"}}]}
    changes: list[Any] = [{"tool_choice": "required"}, {"response_format": {"type": "json_object"}}]
    for fields, reason in zip(changes, ("rendering_changed", ""), strict=True):
        made.messages = [user(f"Hi {fields}")]
        made.ask(reply=Reply(SPLIT), **fields)
        assert made.ask(_MORE).reason == reason


def test_evicted(own_talk: Callable[..., Talk]) -> None:
    assert _second(own_talk(store_max_bytes=1)).reason == "evicted"


def test_none_is_left_out() -> None:
    named = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert set(Reason) <= named | _OF_ONE_PROXY.keys() | _NOT_HERE
    assert _OF_ONE_PROXY.keys() <= set(Reason)
