"""Conversations to append to, as data: a history whose last message is the sampled turn, and what follows it.

Messages are as an OpenAI client sends them. Each new message carries a word of its own, by which the oracle
sees whether a template prints it.
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
    """A column of the report."""
    name: str
    history: list[Message]
    """What led to the sampled turn, and that turn."""
    new: list[Message]
    with_tools: bool = False
    """Tools are declared to the template."""

    @property
    def kind(self) -> str:
        """`call` if the sampled turn calls tools, else `content`."""
        return "call" if self.history[-1].get("tool_calls") else "content"


def _user(content: object) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: object, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


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


_ASK = _user("What is the weather in Zürich?")
_THEN = _user("And newest tomorrow?")
_SYSTEM = {"role": "system", "content": "Be brief, and true."}
_ANSWER = "It is sunny in Zürich today, with a light wind from the west."
_WONDER = "The user asks about Zürich, so I look at the sky."
_ONE = _assistant("", tool_calls=[_call(1, "Zürich")])
_TWO = _assistant("", tool_calls=[_call(1, "Zürich"), _call(2, "Oslo", "clock")])
_SUN = _result(1, '{"newsun": true, "high": 24.50}')
_CLOCK = _result(2, "newclock says\n  nine 九 o'clock")
_LATE = _assistant("", tool_calls=[_call(3, "Oslo", "clock")])
_EARLIER = [_user("Is it late in Oslo?"), _LATE, _result(3, "23:58, -4 °C")]

SHAPES = (
    Shape("text", "content", [_ASK, _assistant(_ANSWER)], [_THEN]),
    Shape("text", "content after system", [_SYSTEM, _ASK, _assistant(_ANSWER)], [_THEN]),
    Shape(
        "text",
        "content, third turn",
        [_ASK, _assistant("Sunny."), _user("Sure?"), _assistant(_ANSWER)],
        [_THEN],
    ),
    Shape("text", "content, tools declared", [_SYSTEM, _ASK, _assistant(_ANSWER)], [_THEN], with_tools=True),
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
    Shape("reasoning", "reasoning", [_ASK, _assistant(_ANSWER, reasoning_content=_WONDER)], [_THEN]),
    Shape(
        "reasoning",
        "reasoning in content",
        [_ASK, _assistant(f"<think>\n{_WONDER}\n</think>\n\n{_ANSWER}")],
        [_THEN],
    ),
    Shape(
        "later rounds",
        "content after results",
        [*_EARLIER, _assistant("Yes, it is late.")],
        [_THEN],
        with_tools=True,
    ),
    Shape(
        "tool results",
        "content, then a result",
        [_ASK, _assistant("[weather(city='Zürich')]")],
        [_result(1, "newsun")],
        with_tools=True,
    ),
    Shape("tool results", "call", [_ASK, _ONE], [_SUN], with_tools=True),
    Shape("tool results", "call after system", [_SYSTEM, _ASK, _ONE], [_SUN], with_tools=True),
    Shape("tool results", "call, then result and user", [_ASK, _ONE], [_SUN, _THEN], with_tools=True),
    Shape(
        "tool results", "content and call", [_ASK, {**_ONE, "content": "I look."}], [_SUN], with_tools=True
    ),
    Shape(
        "reasoning",
        "reasoning and call",
        [_ASK, {**_ONE, "reasoning_content": _WONDER}],
        [_SUN],
        with_tools=True,
    ),
    Shape("parallel calls", "parallel calls", [_ASK, _TWO], [_SUN, _CLOCK], with_tools=True),
    Shape("parallel calls", "parallel calls, results swapped", [_ASK, _TWO], [_CLOCK, _SUN], with_tools=True),
    Shape(
        "parallel calls", "parallel calls, then user", [_ASK, _TWO], [_SUN, _CLOCK, _THEN], with_tools=True
    ),
    Shape(
        "odd text, parts",
        "call, list content",
        [_ASK, _ONE],
        [_result(1, _parts("newsun", "all day"))],
        with_tools=True,
    ),
    Shape("later rounds", "call after results", [*_EARLIER, _ONE], [_SUN], with_tools=True),
    Shape(
        "later rounds",
        "call in a second round",
        [*_EARLIER, _assistant("Yes, it is late."), _ASK, _ONE],
        [_SUN],
        with_tools=True,
    ),
    # what follows an edited turn: the edit itself is new, and what was said after it
    Shape(
        "forks",
        "an edited answer among the new",
        [_ASK, _assistant(_ANSWER)],
        [_user("And newest in Oslo?"), _assistant("newly sunny."), _user("newer still?")],
    ),
    Shape(
        "forks",
        "an edited answer with reasoning",
        [_SYSTEM, _ASK, _assistant(_ANSWER, reasoning_content=_WONDER)],
        [
            _user("And newest in Oslo?"),
            _assistant("newly sunny.", reasoning_content="newly looked at"),
            _user("newer still?"),
        ],
    ),
    Shape(
        "forks",
        "an edited call and its result",
        [_ASK, _assistant(_ANSWER)],
        [
            _user("Is it newly late in Oslo?"),
            {**_LATE, "content": "newly asked"},
            _result(3, "newclock 23:58"),
            _assistant("newly late."),
            _THEN,
        ],
        with_tools=True,
    ),
    Shape(
        "forks",
        "after a call, an edited call",
        [_ASK, _ONE],
        [_SUN, {**_LATE, "content": "newly asked"}, _result(3, "newclock 23:58")],
        with_tools=True,
    ),
)
