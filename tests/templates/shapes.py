"""Conversations to append to, as data: a history whose last message is the sampled turn, and new messages.

Messages have the form that an OpenAI client sends. Each new message has a word of its own that starts with
"new", by which the oracle checks that the template prints the message.
"""

import json
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Tells the {name}.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Where."}},
                "required": ["city"],
            },
        },
    }
    for name in ("weather", "clock")
]


@dataclass(frozen=True)
class Shape:
    """One conversation."""

    group: str
    """The column of the report that counts this conversation."""
    name: str
    history: list[Message]
    """The messages up to and including the sampled turn."""
    new: list[Message]
    """The messages to append."""
    with_tools: bool = False
    """Whether tools are declared to the template."""

    @property
    def kind(self) -> str:
        """`call` if the sampled turn calls tools, else `content`."""
        return "call" if self.history[-1].get("tool_calls") else "content"


def _user(content: object) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: object, **fields: Any) -> Message:
    return {"role": "assistant", "content": content, **fields}


def _call(index: int, city: str, name: str = "weather") -> Message:
    arguments = json.dumps({"city": city, "days": [1, False, None], "unit": "°C"}, ensure_ascii=False)
    return {
        "id": f"call_{index}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _result(index: int, content: object) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{index}", "content": content}


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


_QUESTION = _user("What is the weather in Zürich?")
_NEXT = _user("And newest tomorrow?")
_SYSTEM = {"role": "system", "content": "Be brief, and true."}
_ANSWER = "It is sunny in Zürich today, with a light wind from the west."
_REASONING = "The user asks about Zürich, so I look at the sky."
_ONE_CALL = _assistant("", tool_calls=[_call(1, "Zürich")])
_TWO_CALLS = _assistant("", tool_calls=[_call(1, "Zürich"), _call(2, "Oslo", "clock")])
_WEATHER_RESULT = _result(1, '{"newsun": true, "high": 24.50}')
_CLOCK_RESULT = _result(2, "newclock says\n  nine 九 o'clock")
_CLOCK_CALL = _assistant("", tool_calls=[_call(3, "Oslo", "clock")])
_EARLIER = [_user("Is it late in Oslo?"), _CLOCK_CALL, _result(3, "23:58, -4 °C")]

SHAPES = (
    Shape("text", "content", [_QUESTION, _assistant(_ANSWER)], [_NEXT]),
    Shape("text", "content after system", [_SYSTEM, _QUESTION, _assistant(_ANSWER)], [_NEXT]),
    Shape(
        "text",
        "content, third turn",
        [_QUESTION, _assistant("Sunny."), _user("Sure?"), _assistant(_ANSWER)],
        [_NEXT],
    ),
    Shape(
        "text", "content, tools declared", [_SYSTEM, _QUESTION, _assistant(_ANSWER)], [_NEXT], with_tools=True
    ),
    Shape(
        "odd text, parts",
        "odd text",
        [
            _user("  Wie spät?\t\n\n"),
            _assistant("\n  Neun Uhr 👩‍💻 — e\u0301 nicht é,\u00a0ok?\r\n\tJa 東京 at nine"),
        ],
        [_user(" \n newodd\u200b 🤷🏽‍♀️ \\n {{ x }} <b>&amp;</b>\t \n")],
    ),
    Shape(
        "odd text, parts",
        "list content",
        [_user(_parts("What is", "the weather?")), _assistant(_parts(_ANSWER))],
        [_user(_parts("And newest", "tomorrow?"))],
    ),
    Shape("reasoning", "reasoning", [_QUESTION, _assistant(_ANSWER, reasoning_content=_REASONING)], [_NEXT]),
    Shape(
        "reasoning",
        "reasoning in content",
        [_QUESTION, _assistant(f"<think>\n{_REASONING}\n</think>\n\n{_ANSWER}")],
        [_NEXT],
    ),
    Shape(
        "later rounds",
        "content after results",
        [*_EARLIER, _assistant("Yes, it is late.")],
        [_NEXT],
        with_tools=True,
    ),
    Shape(
        "tool results",
        "content, then a result",
        [_QUESTION, _assistant("[weather(city='Zürich')]")],
        [_result(1, "newsun")],
        with_tools=True,
    ),
    Shape("tool results", "call", [_QUESTION, _ONE_CALL], [_WEATHER_RESULT], with_tools=True),
    Shape(
        "tool results",
        "call after system",
        [_SYSTEM, _QUESTION, _ONE_CALL],
        [_WEATHER_RESULT],
        with_tools=True,
    ),
    Shape(
        "tool results",
        "call, then result and user",
        [_QUESTION, _ONE_CALL],
        [_WEATHER_RESULT, _NEXT],
        with_tools=True,
    ),
    Shape(
        "tool results",
        "content and call",
        [_QUESTION, {**_ONE_CALL, "content": "I look."}],
        [_WEATHER_RESULT],
        with_tools=True,
    ),
    Shape(
        "reasoning",
        "reasoning and call",
        [_QUESTION, {**_ONE_CALL, "reasoning_content": _REASONING}],
        [_WEATHER_RESULT],
        with_tools=True,
    ),
    Shape(
        "parallel calls",
        "parallel calls",
        [_QUESTION, _TWO_CALLS],
        [_WEATHER_RESULT, _CLOCK_RESULT],
        with_tools=True,
    ),
    Shape(
        "parallel calls",
        "parallel calls, results swapped",
        [_QUESTION, _TWO_CALLS],
        [_CLOCK_RESULT, _WEATHER_RESULT],
        with_tools=True,
    ),
    Shape(
        "parallel calls",
        "parallel calls, then user",
        [_QUESTION, _TWO_CALLS],
        [_WEATHER_RESULT, _CLOCK_RESULT, _NEXT],
        with_tools=True,
    ),
    Shape(
        "odd text, parts",
        "call, list content",
        [_QUESTION, _ONE_CALL],
        [_result(1, _parts("newsun", "all day"))],
        with_tools=True,
    ),
    Shape("later rounds", "call after results", [*_EARLIER, _ONE_CALL], [_WEATHER_RESULT], with_tools=True),
    Shape(
        "later rounds",
        "call in a second round",
        [*_EARLIER, _assistant("Yes, it is late."), _QUESTION, _ONE_CALL],
        [_WEATHER_RESULT],
        with_tools=True,
    ),
    # a conversation that was edited: the edited turn and all messages after it are new
    Shape(
        "forks",
        "an edited answer among the new",
        [_QUESTION, _assistant(_ANSWER)],
        [_user("And newest in Oslo?"), _assistant("newly sunny."), _user("newer still?")],
    ),
    Shape(
        "forks",
        "an edited answer with reasoning",
        [_SYSTEM, _QUESTION, _assistant(_ANSWER, reasoning_content=_REASONING)],
        [
            _user("And newest in Oslo?"),
            _assistant("newly sunny.", reasoning_content="newly looked at"),
            _user("newer still?"),
        ],
    ),
    Shape(
        "forks",
        "an edited call and its result",
        [_QUESTION, _assistant(_ANSWER)],
        [
            _user("Is it newly late in Oslo?"),
            {**_CLOCK_CALL, "content": "newly asked"},
            _result(3, "newclock 23:58"),
            _assistant("newly late."),
            _NEXT,
        ],
        with_tools=True,
    ),
    Shape(
        "forks",
        "after a call, an edited call",
        [_QUESTION, _ONE_CALL],
        [_WEATHER_RESULT, {**_CLOCK_CALL, "content": "newly asked"}, _result(3, "newclock 23:58")],
        with_tools=True,
    ),
)
