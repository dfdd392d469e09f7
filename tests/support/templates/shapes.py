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


def user(content: object) -> Message:
    return {"role": "user", "content": content}


def assistant(content: object, **fields: Any) -> Message:
    return {"role": "assistant", "content": content, **fields}


def call(index: int, city: str, name: str = "weather") -> Message:
    arguments = json.dumps({"city": city, "days": [1, False, None], "unit": "°C"}, ensure_ascii=False)
    return {
        "id": f"call_{index}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def result(index: int, content: object) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{index}", "content": content}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


QUESTION = user("What is the weather in Zürich?")
NEXT = user("And newest tomorrow?")
SYSTEM = {"role": "system", "content": "Be brief, and true."}
ANSWER = "It is sunny in Zürich today, with a light wind from the west."
REASONING = "The user asks about Zürich, so I look at the sky."
ONE_CALL = assistant("", tool_calls=[call(1, "Zürich")])
TWO_CALLS = assistant("", tool_calls=[call(1, "Zürich"), call(2, "Oslo", "clock")])
WEATHER_RESULT = result(1, '{"newsun": true, "high": 24.50}')
CLOCK_RESULT = result(2, "newclock says\n  nine 九 o'clock")
CLOCK_CALL = assistant("", tool_calls=[call(3, "Oslo", "clock")])
EARLIER = [user("Is it late in Oslo?"), CLOCK_CALL, result(3, "23:58, -4 °C")]

SHAPES = (
    Shape("text", "content", [QUESTION, assistant(ANSWER)], [NEXT]),
    Shape("text", "content after system", [SYSTEM, QUESTION, assistant(ANSWER)], [NEXT]),
    Shape(
        "text",
        "content, third turn",
        [QUESTION, assistant("Sunny."), user("Sure?"), assistant(ANSWER)],
        [NEXT],
    ),
    Shape("text", "content, tools declared", [SYSTEM, QUESTION, assistant(ANSWER)], [NEXT], with_tools=True),
    Shape(
        "odd text, parts",
        "odd text",
        [
            user("  Wie spät?\t\n\n"),
            assistant("\n  Neun Uhr 👩‍💻 — e\u0301 nicht é,\u00a0ok?\r\n\tJa 東京 at nine"),
        ],
        [user(" \n newodd\u200b 🤷🏽‍♀️ \\n {{ x }} <b>&amp;</b>\t \n")],
    ),
    Shape(
        "odd text, parts",
        "list content",
        [user(parts("What is", "the weather?")), assistant(parts(ANSWER))],
        [user(parts("And newest", "tomorrow?"))],
    ),
    Shape("reasoning", "reasoning", [QUESTION, assistant(ANSWER, reasoning_content=REASONING)], [NEXT]),
    Shape(
        "reasoning",
        "reasoning in content",
        [QUESTION, assistant(f"<think>\n{REASONING}\n</think>\n\n{ANSWER}")],
        [NEXT],
    ),
    Shape(
        "later rounds",
        "content after results",
        [*EARLIER, assistant("Yes, it is late.")],
        [NEXT],
        with_tools=True,
    ),
    Shape(
        "tool results",
        "content, then a result",
        [QUESTION, assistant("[weather(city='Zürich')]")],
        [result(1, "newsun")],
        with_tools=True,
    ),
    Shape("tool results", "call", [QUESTION, ONE_CALL], [WEATHER_RESULT], with_tools=True),
    Shape(
        "tool results",
        "call after system",
        [SYSTEM, QUESTION, ONE_CALL],
        [WEATHER_RESULT],
        with_tools=True,
    ),
    Shape(
        "tool results",
        "call, then result and user",
        [QUESTION, ONE_CALL],
        [WEATHER_RESULT, NEXT],
        with_tools=True,
    ),
    Shape(
        "tool results",
        "content and call",
        [QUESTION, {**ONE_CALL, "content": "I look."}],
        [WEATHER_RESULT],
        with_tools=True,
    ),
    Shape(
        "reasoning",
        "reasoning and call",
        [QUESTION, {**ONE_CALL, "reasoning_content": REASONING}],
        [WEATHER_RESULT],
        with_tools=True,
    ),
    Shape(
        "parallel calls",
        "parallel calls",
        [QUESTION, TWO_CALLS],
        [WEATHER_RESULT, CLOCK_RESULT],
        with_tools=True,
    ),
    Shape(
        "parallel calls",
        "parallel calls, results swapped",
        [QUESTION, TWO_CALLS],
        [CLOCK_RESULT, WEATHER_RESULT],
        with_tools=True,
    ),
    Shape(
        "parallel calls",
        "parallel calls, then user",
        [QUESTION, TWO_CALLS],
        [WEATHER_RESULT, CLOCK_RESULT, NEXT],
        with_tools=True,
    ),
    Shape(
        "odd text, parts",
        "call, list content",
        [QUESTION, ONE_CALL],
        [result(1, parts("newsun", "all day"))],
        with_tools=True,
    ),
    Shape("later rounds", "call after results", [*EARLIER, ONE_CALL], [WEATHER_RESULT], with_tools=True),
    Shape(
        "later rounds",
        "call in a second round",
        [*EARLIER, assistant("Yes, it is late."), QUESTION, ONE_CALL],
        [WEATHER_RESULT],
        with_tools=True,
    ),
    # a conversation that was edited: the edited turn and all messages after it are new
    Shape(
        "forks",
        "an edited answer among the new",
        [QUESTION, assistant(ANSWER)],
        [user("And newest in Oslo?"), assistant("newly sunny."), user("newer still?")],
    ),
    Shape(
        "forks",
        "an edited answer with reasoning",
        [SYSTEM, QUESTION, assistant(ANSWER, reasoning_content=REASONING)],
        [
            user("And newest in Oslo?"),
            assistant("newly sunny.", reasoning_content="newly looked at"),
            user("newer still?"),
        ],
    ),
    Shape(
        "forks",
        "an edited call and its result",
        [QUESTION, assistant(ANSWER)],
        [
            user("Is it newly late in Oslo?"),
            {**CLOCK_CALL, "content": "newly asked"},
            result(3, "newclock 23:58"),
            assistant("newly late."),
            NEXT,
        ],
        with_tools=True,
    ),
    Shape(
        "forks",
        "after a call, an edited call",
        [QUESTION, ONE_CALL],
        [WEATHER_RESULT, {**CLOCK_CALL, "content": "newly asked"}, result(3, "newclock 23:58")],
        with_tools=True,
    ),
)
