"""Markers and words by which to find messages in a rendering."""

import copy
import json
from collections.abc import Sequence

from tests.support.templates.shapes import Message

MARKS = ("Qmarkonez", "Zothermarkthatislongerq")
"""Words that occur in no conversation."""


def marked(history: Sequence[Message], mark: str) -> list[Message]:
    """The history with a marker at the end of the text of its last turn."""
    *before, last = copy.deepcopy(list(history))
    if last.get("tool_calls"):
        function = last["tool_calls"][-1]["function"]
        arguments = json.loads(function["arguments"] or "{}")
        if marks_a_name(history):
            function["name"] += mark
        else:
            arguments[[name for name, value in arguments.items() if isinstance(value, str)][-1]] += mark
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    elif isinstance(last["content"], list):
        last["content"][-1]["text"] += mark
    else:
        last["content"] = (last["content"] or "") + mark
    return [*before, last]


def marks_a_name(history: Sequence[Message]) -> bool:
    """Whether `marked` puts the marker into the name of a call: no argument of the last call is a string."""
    calls = history[-1].get("tool_calls")
    arguments = json.loads(calls[-1]["function"]["arguments"] or "{}") if calls else {}
    return bool(calls) and not any(isinstance(value, str) for value in arguments.values())


def words_of(new: Sequence[Message]) -> list[str]:
    """The word of each new message that starts with "new", by which to find the message."""
    texts = [content_of(message).replace('"', " ").split() for message in new]
    return [next(word for word in text if word.startswith("new")).rstrip(":,\u200b") for text in texts]


def content_of(message: Message) -> str:
    """A message's content as text."""
    content = message.get("content")
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""
