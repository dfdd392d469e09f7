"""The forms in which clients send an answer back in words of their own that hold nothing new.

smolagents puts the stop string that ended an answer at its end, and tool calls into the text, as Python
prints them:

    I look.
    Calling tools:
    [{'id': 'call_1', 'type': 'function', 'function': {'name': 'get_weather', 'arguments': {'city': 'Rome'}}}]

Its `CodeAgent`, whose model calls no tools, writes one call, whose argument is the code of the text. A turn
is found by these forms too. They are made of what was sampled, and nothing of what a client sends is parsed:
any other text is an edit. Source: smolagents 1.26, `memory.py` and `agents.py`.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

_MARK = "Calling tools:\n"
_CODE = re.compile(r"<code>(.*?)</code>", re.DOTALL)


def other_forms(
    message: dict[str, Any], stop_reason: str | int | None, turns_before: int
) -> Iterator[dict[str, Any]]:
    """The other forms of an answer.

    Args:
        stop_reason: the stop string that ended it was sampled, and is not in its text.
        turns_before: number of the assistant messages before it, by which `CodeAgent` names its calls in its
            first task; in later ones it counts these too, and such a turn is not found.
    """
    content = message.get("content") or ""
    if not isinstance(content, str):
        return
    if isinstance(stop_reason, str) and not content.endswith(stop_reason):
        content += stop_reason
        yield {**message, "content": content}
    printed = []
    if calls := message.get("tool_calls"):
        with suppress(LookupError, TypeError, ValueError, RecursionError):  # no client prints another shape
            for call in calls:
                called = call["function"]
                printed.append(_printed(call["id"], called["name"], json.loads(called["arguments"])))
    elif "<code>" in content and (code := [each.strip() for each in _CODE.findall(content)]):
        printed = [_printed(f"call_{turns_before + 1}", "python_interpreter", "\n\n".join(code))]
    if printed and len(printed) == len(calls or printed):
        yield {"role": "assistant", "content": f"{content.strip()}\n{_MARK}{printed}"}


def _printed(own_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": own_id, "type": "function", "function": {"name": name, "arguments": arguments}}
