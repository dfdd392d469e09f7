"""A streamed answer is the whole answer, in whatever pieces it comes, as the SDKs of clients read it."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import omit
from openai._models import construct_type_unchecked as construct
from openai.lib.streaming.chat._completions import ChatCompletionStreamState
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent

from tokenproxy.base.request import Visible
from tokenproxy.engine.sse import data_event, event_data, split_events
from tokenproxy.formats.messages.answer import MessagesTranslation
from tokenproxy.formats.responses.answer import ResponsesTranslation
from tokenproxy.formats.responses.request import read_request
from tokenproxy.turn import parsing
from tokenproxy.turn.answer import Redactor, StreamedAnswer
from tokenproxy.turn.reader import CompletionReader
from tokenproxy.turn.usual import UsualChunk

_RESPONSES: Any = ResponseStreamEvent
_ARGUMENTS = ("{}", '{"city": "Paris"}', '{"a": {"b": "}"}, "c": [1, "é"]}')
_words = st.text("ab é\n", max_size=6)
_message = st.fixed_dictionaries(
    {"reasoning": _words, "content": _words, "calls": st.lists(st.sampled_from(_ARGUMENTS), max_size=3)}
)


def _pieces(random: Random, text: str) -> list[str]:
    cuts = sorted(random.randint(0, len(text)) for _ in range(random.randint(0, 3)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def _deltas(random: Random, message: dict[str, Any]) -> list[dict[str, Any]]:
    """Any merge and interleaving: each call begins after the one before it, and all else is free."""
    queues: list[list[dict[str, Any]]] = [
        [{name: piece} for piece in _pieces(random, message[name])] for name in ("reasoning", "content")
    ]
    starts: list[dict[str, Any]] = []
    for index, arguments in enumerate(message["calls"]):
        head = {"id": f"chatcmpl-tool-{index:032}", "type": "function"}
        named = {"index": index, **head, "function": {"name": "look", "arguments": ""}}
        more = []
        if random.random() < 0.2:  # the name comes first
            named = {"index": index, "function": {"name": "look", "arguments": ""}}
            more.append({"call": {"index": index, **head, "function": {"arguments": ""}}})
        for piece in _pieces(random, arguments):
            call: dict[str, Any] = {"index": index, "function": {"arguments": piece}}
            match random.choice(["", "nulls", "repeated"]):
                case "nulls":
                    call |= {"id": None, "function": {"name": None, "arguments": piece}}
                case "repeated":
                    call |= {**head, "function": {"name": "look", "arguments": piece}}
            more.append({"call": call})
        starts.append({"call": named})
        queues.append(more)
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    begun = 0
    while any(queues[:2]) or any(queues[2:]) or begun < len(starts):
        ready = [queue for queue in queues[: 2 + begun] if queue]
        ready += [starts[begun:]] if begun < len(starts) else []
        queue = random.choice(ready)
        part = queue[0]
        if begun < len(starts) and part is starts[begun]:
            begun += 1
        else:
            queue.pop(0)
        delta = deltas[-1] if len(deltas) > 1 and random.random() < 0.5 else {}
        if delta is not deltas[-1]:
            deltas.append(delta)
        if "call" in part:
            delta.setdefault("tool_calls", []).append(part["call"])
        else:
            ((name, text),) = part.items()
            delta[name] = delta.get(name, "") + text
    return deltas


def _choice(index: int, **fields: Any) -> dict[str, Any]:
    return {"index": index, "finish_reason": None, "stop_reason": None, "token_ids": [5], **fields}


_LATER: list[Callable[[dict[str, Any]], dict[str, Any]]] = [
    lambda part: {},
    lambda part: {"delta": {**part["delta"], "later": None}},
    lambda part: {"later": None},
]


def _events(choices: list[list[dict[str, Any]]]) -> list[bytes]:
    """The events of a stream with these deltas, one choice after the other in turns.

    Some hold fields that are not known.
    """
    parts = [
        _choice(index, delta=delta)
        for step in range(max(map(len, choices)))
        for index, deltas in enumerate(choices)
        for delta in deltas[step : step + 1]
    ]
    parts += [_choice(index, delta={}, finish_reason="stop") for index in range(len(choices))]
    parts = [part | _LATER[number % len(_LATER)](part) for number, part in enumerate(parts)]
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return [data_event(msgspec.json.encode({**head, "choices": [part]})) for part in parts]


def _written(answer: StreamedAnswer, events: list[bytes]) -> list[dict[str, Any]]:
    """What the client gets."""
    sent = b""
    for event in events:
        usual = UsualChunk.match(event)
        if usual is not None and usual.field:
            sent += answer.usual(event, usual) or b""
        else:
            sent += answer.event(event, parsing.parse(event_data(event) or b"")) or b""
    datas = [event_data(event) for event in split_events(sent + answer.end())]
    return [json.loads(data) for data in datas if data and data != b"[DONE]"]


Said = tuple[str, str, list[tuple[str, Any]]]


def _said(message: dict[str, Any]) -> Said:
    calls = [("look", json.loads(arguments)) for arguments in message["calls"]]
    return message["reasoning"], message["content"], calls


def _of_chat(message: dict[str, Any]) -> Said:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    assert all(
        call["id"] == f"chatcmpl-tool-{i:032}" for i, call in enumerate(message.get("tool_calls") or ())
    )
    calls = [(function["name"], json.loads(function["arguments"])) for function in functions]
    return message.get("reasoning") or "", message.get("content") or "", calls


def _of_messages(content: list[dict[str, Any]]) -> Said:
    """White space after a call is not written."""
    called = [block["id"] for block in content if block["type"] == "tool_use"]
    assert called == [f"chatcmpl-tool-{index:032}" for index in range(len(called))]
    thinking = "".join(block["thinking"] for block in content if block["type"] == "thinking")
    text = "".join(block["text"] for block in content if block["type"] == "text")
    return (
        thinking,
        text,
        [(block["name"], block["input"]) for block in content if block["type"] == "tool_use"],
    )


def _of_responses(output: list[dict[str, Any]]) -> Said:
    texts = {"reasoning": "", "message": ""}
    for item in output:
        if item["type"] in texts:
            texts[item["type"]] += "".join(part["text"] for part in item["content"])
    calls = [item for item in output if item["type"] == "function_call"]
    assert [call["call_id"] for call in calls] == [f"chatcmpl-tool-{i:032}" for i in range(len(calls))]
    return (
        texts["reasoning"],
        texts["message"],
        [(call["name"], json.loads(call["arguments"])) for call in calls],
    )


async def _keep(name: str, content: bytes) -> bool:
    return True


def _responses() -> ResponsesTranslation:
    return ResponsesTranslation(read_request(b'{"input": "Hi", "stream": true}'), [], [], _keep)


def _stream(messages: list[dict[str, Any]], seed: int) -> tuple[list[dict[str, Any]], list[Any]]:
    random = Random(seed)  # not hypothesis' own draws, which take a hundred times as long
    return messages, [_deltas(random, message) for message in messages]


_streams = st.builds(_stream, st.lists(_message, min_size=1, max_size=2), st.integers(0, 2**32))


@given(_streams, st.booleans())
def test_chat(stream: tuple[list[dict[str, Any]], Any], ids: bool) -> None:
    messages, deltas = stream
    visible = Visible(ids, ids, usage=ids, running_usage=ids)
    state: Any = ChatCompletionStreamState()
    for data in _written(Redactor(visible), _events(deltas)):
        state.handle_chunk(construct(type_=ChatCompletionChunk, value=data))
    choices = state.current_completion_snapshot.choices
    assert [_of_chat(choice.message.model_dump()) for choice in choices] == [*map(_said, messages)]


@given(_streams)
def test_the_record(stream: tuple[list[dict[str, Any]], Any]) -> None:
    messages, deltas = stream
    reader = CompletionReader(len(messages))
    for event in _events(deltas):
        reader.read(parsing.parse(event_data(event) or b""))
    choices = sorted(reader.rest().choices, key=lambda choice: choice.index)
    assert [_of_chat(choice.message) for choice in choices] == [*map(_said, messages)]


@settings(max_examples=50)
@given(_streams)
def test_messages(stream: tuple[list[dict[str, Any]], Any]) -> None:
    messages, deltas = stream
    snapshot, buffers = None, dict[int, bytes]()
    open_blocks: list[int] = []
    for data in _written(MessagesTranslation("claude"), _events(deltas)):
        if data["type"] == "content_block_start":
            assert not open_blocks
            open_blocks.append(data["index"])
        elif data["type"] == "content_block_stop":
            assert open_blocks.pop() == data["index"]
        event: Any = construct(type_=RawMessageStreamEvent, value=data)  # type: ignore[arg-type]
        snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    assert snapshot is not None
    thinking, text, calls = _of_messages([block.model_dump() for block in snapshot.content])
    expected = _said(messages[0])
    assert calls == expected[2]
    for said, whole in zip((thinking, text), expected[:2], strict=True):
        assert whole.startswith(said) and not whole[len(said) :].strip()
    assert snapshot.stop_reason == ("tool_use" if calls else "end_turn")


@settings(max_examples=50)
@given(_streams)
def test_responses(stream: tuple[list[dict[str, Any]], Any]) -> None:
    messages, deltas = stream
    state: Any = ResponseStreamState(input_tools=[], text_format=omit)
    for data in _written(_responses(), _events(deltas)):
        last = state.handle_event(construct(type_=_RESPONSES, value=data))[-1]
        kept = state._ResponseStreamState__current_snapshot
    assert last.type == "response.completed"
    whole, snapshot = ([item.model_dump() for item in one.output] for one in (last.response, kept))
    assert _of_responses(whole) == _said(messages[0])
    assert _of_responses(snapshot)[1:] == _said(messages[0])[1:]  # the SDK keeps no pieces of reasoning
