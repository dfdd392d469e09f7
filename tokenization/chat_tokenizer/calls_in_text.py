"""Tool calls that a client writes into the text of an assistant message, as smolagents does.

Its agents send what the model sampled back with the calls as Python prints them:

    I look.
    Calling tools:
    [{'id': 'call_1', 'type': 'function', 'function': {'name': 'get_weather', 'arguments': {'city': 'Rome'}}}]

`CodeAgent`, whose model calls no tools, writes a call whose argument is the code in the text before it.
"""

import ast
import json
from typing import Any

_MARK = "Calling tools:\n"
_LONGEST = 2**15
"""Characters of the calls: Python reads that many in 50 ms."""


def split_calls(content: str) -> tuple[str, list[dict[str, Any]]] | None:
    """The text before the calls, and the calls as a chat message holds them; None if it ends with none.

    A call that only repeats a part of the text is left out.
    """
    text, mark, written = content.rpartition(_MARK)
    if not mark or len(written) > _LONGEST:
        return None
    try:
        # a chat message holds what JSON has
        calls = json.loads(
            json.dumps(ast.literal_eval(written), ensure_ascii=False, allow_nan=False).encode()
        )
        arguments = [call["function"]["arguments"] for call in calls]
    except (ValueError, TypeError, LookupError, SyntaxError, MemoryError, RecursionError):
        return None
    called = zip(calls, arguments, strict=True)
    return text, [call for call, given in called if not (isinstance(given, str) and given in text)]
