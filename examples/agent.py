"""An agent on the plain OpenAI SDK: it keeps messages, knows no ids, and only its base URL is the proxy's.

It asks about the weather and calls a tool. Each row of the table is one request: whether its prompt
continues the ids of the turn before (extended) or was rendered anew (rendered, and the reason), how many
ids were reused, and how many the chat template put behind them.

An API key, if the server wants one, is in OPENAI_API_KEY.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from openai import APIConnectionError, OpenAI, OpenAIError
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion

QUESTIONS = ("What is the weather in Paris?", "And in Rome?", "I like rain. How about Oslo?")
WEATHER = {"paris": "18 °C, light rain", "rome": "27 °C, sunny", "oslo": "9 °C, heavy rain"}
ARGUMENTS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 24}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "get_weather", "description": "Weather in a city", "strict": True, "parameters": ARGUMENTS}
ROW = "{:>4}  {:<8}  {:<16} {:>6} {:>8}  {:<10}  {}"
SAID = ("source", "reason", "reused", "appended")


def main() -> int:
    """Run the agent: 0 when it is done, 1 when the server refuses, 2 when none answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="server, without /v1 (%(default)s)")
    parser.add_argument("--model", default="smollm2", help="name that GET /v1/models lists (%(default)s)")
    parser.add_argument("--stream", action="store_true", help="ask for streams; prompts stay as exact")
    parser.add_argument(
        "--session", metavar="ID", help="work under /sessions/ID/v1; at the end set a reward, count samples"
    )
    options = parser.parse_args()
    root, session = options.url.rstrip("/"), quote(options.session or "", safe="")
    client = OpenAI(
        base_url=f"{root}/sessions/{session}/v1" if session else f"{root}/v1",
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
    )
    try:
        converse(client, options.model, options.stream)
        if session:
            rewarded = client.with_options(base_url=f"{root}/v1/sessions/{session}")
            rewarded.post("/reward", body={"reward": 1.0}, cast_to=object)
            samples = rewarded.get("/samples", cast_to=dict[str, Any])["samples"]
            print(f"session {options.session}: reward 1.0, samples: {len(samples)}")
    except APIConnectionError:
        print(f"agent.py: no server answers at {root}; --url names another one", file=sys.stderr)
        return 2
    except OpenAIError as error:
        print(f"agent.py: {error}", file=sys.stderr)
        return 1
    return 0


def converse(client: OpenAI, model: str, stream: bool) -> None:
    """Two turns for each question: the model calls the tool, then says what it learned."""
    messages: list[Any] = []
    for number in range(2 * len(QUESTIONS)):
        calls_tool = number % 2 == 0
        if calls_tool:
            messages.append({"role": "user", "content": QUESTIONS[number // 2]})
        request = {
            "model": model,
            "messages": messages,
            "tools": [{"type": "function", "function": TOOL}],
            # A large model decides for itself ("auto"); the demo's small one has to be told.
            "tool_choice": "required" if calls_tool else "none",
            "temperature": 0.8,
            "max_tokens": 96,
        }
        headers, completion = ask(client, stream, **request)
        message = completion.choices[0].message
        calls = [call for call in message.tool_calls or [] if call.type == "function"]
        messages.append(message)
        for call in calls:
            content = weather(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        if calls_tool and not calls:  # a call that was cut short is no call
            messages.append({"role": "user", "content": "Please go on."})
        if number == 0:
            print(ROW.format("turn", *SAID, "finish", "says"))
        about = [headers.get(f"x-prompt-{name}", "-") for name in SAID]
        text = " ".join([*(call.function.arguments for call in calls), message.content or ""])
        print(ROW.format(number + 1, *about, completion.choices[0].finish_reason, repr(text[:40])))


def ask(client: OpenAI, stream: bool, **request: Any) -> tuple[Mapping[str, str], ChatCompletion]:
    """Headers and answer; a stream is put together to the same."""
    if not stream:
        answer = client.chat.completions.with_raw_response.create(**request)
        return answer.headers, answer.parse()
    answer = client.chat.completions.with_raw_response.create(**request, stream=True)
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for chunk in answer.parse():
        state.handle_chunk(chunk)
    return answer.headers, state.current_completion_snapshot


def weather(arguments: str) -> str:
    """What the tool answers, also to arguments that a model cut short."""
    try:
        return WEATHER.get(json.loads(arguments)["city"].strip().lower(), "no weather station there")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"error: {error}"


if __name__ == "__main__":
    sys.exit(main())
