"""An agent on the plain OpenAI SDK: it keeps messages and no ids; only its base URL is that of the proxy.

It calls a tool to answer questions about the weather. Each row of the table is one request: whether its
prompt extends the ids of the turn before (extended) or was rendered from messages (rendered, with the
reason), how many ids were reused, and how many ids of new messages were appended.

If the server requires an API key, set OPENAI_API_KEY.
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
PROMPT_HEADERS = ("source", "reason", "reused", "appended")


def main() -> int:
    """Run the agent: returns 0 after a complete run, 1 if the server refuses, 2 if none responds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8100", help="server, without /v1 (%(default)s)")
    parser.add_argument("--model", default="smollm2", help="name that GET /v1/models lists (%(default)s)")
    parser.add_argument("--stream", action="store_true", help="request streams")
    parser.add_argument(
        "--session",
        metavar="ID",
        help="create the session ID and use it; at the end set a reward and count the samples",
    )
    options = parser.parse_args()
    root, session = options.url.rstrip("/"), quote(options.session or "", safe="")
    client = OpenAI(
        base_url=f"{root}/sessions/{session}/v1" if session else f"{root}/v1",
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
    )
    try:
        if session:
            new = {"id": options.session, "exists": "error", "metadata": {"program": "agent.py"}}
            client.with_options(base_url=f"{root}/v1", max_retries=0).post(
                "/sessions", body=new, cast_to=object
            )
        converse(client, options.model, options.stream)
        if session:
            rewarded = client.with_options(base_url=f"{root}/v1/sessions/{session}")
            rewarded.post("/reward", body={"reward": 1.0}, cast_to=object)
            samples = rewarded.get("/samples", cast_to=dict[str, Any])["samples"]
            print(f"session {options.session}: reward 1.0, samples: {len(samples)}")
    except APIConnectionError:
        print(f"agent.py: no server at {root}: start one, or pass --url", file=sys.stderr)
        return 2
    except OpenAIError as error:
        print(f"agent.py: {error}", file=sys.stderr)
        return 1
    return 0


def converse(client: OpenAI, model: str, stream: bool) -> None:
    """Hold two turns for each question: the model calls the tool, then answers from its result."""
    messages: list[Any] = []
    for number in range(2 * len(QUESTIONS)):
        calls_tool = number % 2 == 0
        if calls_tool:
            messages.append({"role": "user", "content": QUESTIONS[number // 2]})
        request = {
            "model": model,
            "messages": messages,
            "tools": [{"type": "function", "function": TOOL}],
            # A large model decides for itself ("auto"); the demo's small one must be told.
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
        if calls_tool and not calls:  # max_tokens cut the call short
            messages.append({"role": "user", "content": "Please go on."})
        if number == 0:
            print(ROW.format("turn", *PROMPT_HEADERS, "finish", "content"))
        prompt_info = [headers.get(f"x-prompt-{name}", "-") for name in PROMPT_HEADERS]
        text = " ".join([*(call.function.arguments for call in calls), message.content or ""])
        print(ROW.format(number + 1, *prompt_info, completion.choices[0].finish_reason, repr(text[:40])))


def ask(client: OpenAI, stream: bool, **request: Any) -> tuple[Mapping[str, str], ChatCompletion]:
    """Send a request; returns headers and completion, which for a stream is assembled from its chunks."""
    if not stream:
        response = client.chat.completions.with_raw_response.create(**request)
        return response.headers, response.parse()
    response = client.chat.completions.with_raw_response.create(**request, stream=True)
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for chunk in response.parse():
        state.handle_chunk(chunk)
    return response.headers, state.current_completion_snapshot


def weather(arguments: str) -> str:
    """The tool's result; an error text if the arguments are incomplete or wrong."""
    try:
        return WEATHER.get(json.loads(arguments)["city"].strip().lower(), "no weather station there")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"error: {error}"


if __name__ == "__main__":
    sys.exit(main())
