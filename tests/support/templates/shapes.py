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

    name: str
    history: list[Message]
    """The messages up to and including the sampled turn."""
    new: list[Message]
    """The messages to append."""
    tools_declared: bool = False
    """Whether tools are declared to the template although nothing calls them."""

    @property
    def with_tools(self) -> bool:
        """Whether tools are declared to the template."""
        messages = [*self.history, *self.new]
        called = any(message.get("tool_calls") or message["role"] == "tool" for message in messages)
        return called or self.tools_declared

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
    return {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(index: int, content: object) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{index}", "content": content}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


QUESTION = user("What is the weather in Zürich?")
NEXT = user("And newest tomorrow?")
SYSTEM = {"role": "system", "content": "Be brief, and true."}
ANSWER = "It is sunny in Zürich today, with a light wind from the west."
ANSWERED = [QUESTION, assistant(ANSWER)]
LATE = assistant("Yes, it is late.")
REASONING = "The user asks about Zürich, so I look at the sky."
ONE_CALL = assistant("", tool_calls=[call(1, "Zürich")])
CALLED = [QUESTION, ONE_CALL]
TWO_CALLS = assistant("", tool_calls=[call(1, "Zürich"), call(2, "Oslo", "clock")])
WEATHER_RESULT = result(1, '{"newsun": true, "high": 24.50}')
CLOCK_RESULT = result(2, "newclock says\n  nine 九 o'clock")
CLOCK_CALL = assistant("", tool_calls=[call(3, "Oslo", "clock")])
EARLIER = [user("Is it late in Oslo?"), CLOCK_CALL, result(3, "23:58, -4 °C")]
_NEWLY_ASKED = [{**CLOCK_CALL, "content": "newly asked"}, result(3, "newclock 23:58")]
_ODD = "\n  Neun Uhr 👩‍💻 — e\u0301 nicht é,\u00a0ok?\r\n\tJa 東京 at nine"
_NEW_ODD = " \n newodd\u200b 🤷🏽‍♀️ \\n {{ x }} <b>&amp;</b>\t \n"

SHAPES = (
    Shape("content", ANSWERED, [NEXT]),
    Shape("content after system", [SYSTEM, *ANSWERED], [NEXT]),
    Shape("content, third turn", [QUESTION, assistant("Sunny."), user("Sure?"), assistant(ANSWER)], [NEXT]),
    Shape("content, tools declared", [SYSTEM, *ANSWERED], [NEXT], tools_declared=True),
    Shape("odd text", [user("  Wie spät?\t\n\n"), assistant(_ODD)], [user(_NEW_ODD)]),
    Shape(
        "list content",
        [user(parts("What is", "the weather?")), assistant(parts(ANSWER))],
        [user(parts("And newest", "tomorrow?"))],
    ),
    Shape("reasoning", [QUESTION, assistant(ANSWER, reasoning_content=REASONING)], [NEXT]),
    Shape(
        "reasoning in content", [QUESTION, assistant(f"<think>\n{REASONING}\n</think>\n\n{ANSWER}")], [NEXT]
    ),
    Shape("content after results", [*EARLIER, LATE], [NEXT]),
    Shape("content, then a result", [QUESTION, assistant("[weather(city='Zürich')]")], [result(1, "newsun")]),
    Shape("call", CALLED, [WEATHER_RESULT]),
    Shape("call after system", [SYSTEM, *CALLED], [WEATHER_RESULT]),
    Shape("call, then result and user", CALLED, [WEATHER_RESULT, NEXT]),
    Shape("content and call", [QUESTION, {**ONE_CALL, "content": "I look."}], [WEATHER_RESULT]),
    Shape("reasoning and call", [QUESTION, {**ONE_CALL, "reasoning_content": REASONING}], [WEATHER_RESULT]),
    Shape("parallel calls", [QUESTION, TWO_CALLS], [WEATHER_RESULT, CLOCK_RESULT]),
    Shape("parallel calls, results swapped", [QUESTION, TWO_CALLS], [CLOCK_RESULT, WEATHER_RESULT]),
    Shape("parallel calls, then user", [QUESTION, TWO_CALLS], [WEATHER_RESULT, CLOCK_RESULT, NEXT]),
    Shape("call, list content", CALLED, [result(1, parts("newsun", "all day"))]),
    Shape("call after results", [*EARLIER, ONE_CALL], [WEATHER_RESULT]),
    Shape("call in a second round", [*EARLIER, LATE, *CALLED], [WEATHER_RESULT]),
    # a conversation that was edited: the edited turn and all messages after it are new
    Shape(
        "an edited answer among the new",
        ANSWERED,
        [user("And newest in Oslo?"), assistant("newly sunny."), user("newer still?")],
    ),
    Shape(
        "an edited answer with reasoning",
        [SYSTEM, QUESTION, assistant(ANSWER, reasoning_content=REASONING)],
        [
            user("And newest in Oslo?"),
            assistant("newly sunny.", reasoning_content="newly looked at"),
            user("newer still?"),
        ],
    ),
    Shape(
        "an edited call and its result",
        ANSWERED,
        [user("Is it newly late in Oslo?"), *_NEWLY_ASKED, assistant("newly late."), NEXT],
    ),
    Shape("after a call, an edited call", CALLED, [WEATHER_RESULT, *_NEWLY_ASKED]),
)
