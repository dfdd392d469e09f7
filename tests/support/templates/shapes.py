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
REASONED = assistant(ANSWER, reasoning_content=REASONING)
_THOUGHT = assistant(f"<think>\n{REASONING}\n</think>\n\n{ANSWER}")
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

_SUNNY = [QUESTION, assistant("Sunny.")]
_OSLO, _STILL = user("And newest in Oslo?"), user("newer still?")
_NEWLY_REASONED = [_OSLO, assistant("newly sunny.", reasoning_content="newly looked at"), _STILL]

SHAPES = (
    Shape("content", ANSWERED, [NEXT]),
    Shape("content after system", [SYSTEM, *ANSWERED], [NEXT]),
    Shape("content, third turn", [*_SUNNY, user("Sure?"), assistant(ANSWER)], [NEXT]),
    Shape("content, tools declared", [SYSTEM, *ANSWERED], [NEXT], tools_declared=True),
    Shape("odd text", [user("  Wie spät?\t\n\n"), assistant(_ODD)], [user(_NEW_ODD)]),
    Shape(
        "list content",
        [user(parts("What is", "the weather?")), assistant(parts(ANSWER))],
        [user(parts("And newest", "tomorrow?"))],
    ),
    Shape("reasoning", [QUESTION, REASONED], [NEXT]),
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
    Shape("an edited answer among the new", ANSWERED, [_OSLO, assistant("newly sunny."), _STILL]),
    Shape("an edited answer with reasoning", [SYSTEM, QUESTION, REASONED], _NEWLY_REASONED),
    Shape(
        "an edited call and its result",
        ANSWERED,
        [user("Is it newly late in Oslo?"), *_NEWLY_ASKED, assistant("newly late."), NEXT],
    ),
    Shape("after a call, an edited call", CALLED, [WEATHER_RESULT, *_NEWLY_ASKED]),
)

_CLOCK = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
_NO_ARGUMENTS = assistant("", tool_calls=[_CLOCK])
_SAME_IDS = assistant("", tool_calls=[call(1, "Zürich"), call(1, "Oslo", "clock")])
_BERN = [assistant("", tool_calls=[call(4, "Bern")]), result(4, "12 °C")]
_SAME_ID = [QUESTION, assistant("", tool_calls=[call(1, "Bern")]), result(1, "12 °C")]
_BOTH_RESULTS = [WEATHER_RESULT, result(2, "newclock says nine")]
_DEVELOPER = {**SYSTEM, "role": "developer"}
_KIND = {"role": "developer", "content": "Be kind."}
_I_LOOK = {**ONE_CALL, "content": "I look."}
_REASONED_CALL = {**_I_LOOK, "reasoning_content": REASONING}

FURTHER_SHAPES = (
    Shape("developer", [_DEVELOPER, *ANSWERED], [NEXT]),
    Shape("system and developer", [SYSTEM, _KIND, *ANSWERED], [NEXT]),
    Shape("developer, call", [_DEVELOPER, *CALLED], [WEATHER_RESULT]),
    Shape("system in the middle", [*_SUNNY, SYSTEM, user("Sure?"), assistant(ANSWER)], [NEXT]),
    Shape("new system message", ANSWERED, [{"role": "system", "content": "Be newly brief."}, NEXT]),
    Shape("users in a row", [QUESTION, user("In Celsius."), assistant(ANSWER)], [user("newer thanks"), NEXT]),
    Shape("call in a fourth round", [*EARLIER, *_BERN, *_BERN, ONE_CALL], [WEATHER_RESULT]),
    Shape("the same id in each round", [*_SAME_ID, ONE_CALL], [WEATHER_RESULT]),
    Shape("a round after a call and an answer", [*EARLIER, LATE, QUESTION, TWO_CALLS], _BOTH_RESULTS),
    Shape("call, null content", [QUESTION, {**ONE_CALL, "content": None}], [WEATHER_RESULT]),
    Shape("call without arguments", [QUESTION, _NO_ARGUMENTS], [WEATHER_RESULT]),
    Shape("content, reasoning and call", [QUESTION, _REASONED_CALL], [WEATHER_RESULT]),
    Shape("content and call, then result and user", [QUESTION, _I_LOOK], [WEATHER_RESULT, NEXT]),
    Shape("one result is missing", [QUESTION, TWO_CALLS], [WEATHER_RESULT]),
    Shape("all results are missing", [QUESTION, TWO_CALLS], [NEXT]),
    Shape("equal ids", [QUESTION, _SAME_IDS], [WEATHER_RESULT, result(1, "newclock says nine")]),
)
"""More conversations for every template of the corpus."""
