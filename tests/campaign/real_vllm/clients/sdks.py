"""OpenAI's and Anthropic's SDKs for Python, as applications use them."""

from typing import Any

import anthropic

from tests.campaign.real_vllm.clients.target import MODEL, QUESTIONS, Target
from tests.support.talk import add_delta
from tokenproxy.demo.tools import TOOLS, call_tool

Message = dict[str, Any]
_SAMPLING: dict[str, Any] = {"model": MODEL, "temperature": 1.2}
_FUNCTIONS: list[Any] = [tool["function"] for tool in TOOLS]


async def hold_openai(target: Target) -> None:
    """The chat route."""
    messages: list[Any] = []
    async with target.sdk() as client:
        for text, choice, stream in QUESTIONS:
            messages.append({"role": "user", "content": text})
            asked: dict[str, Any] = {**_SAMPLING, "messages": messages, "tools": TOOLS, "tool_choice": choice}
            asked |= {"max_tokens": 64, "extra_body": {"return_token_ids": True}}
            message: Message = {"role": "assistant", "content": ""}
            if stream:
                async for chunk in await client.chat.completions.create(**asked, stream=True):
                    for part in chunk.to_dict()["choices"]:
                        add_delta(message, part["delta"])
            else:
                whole = await client.chat.completions.create(**asked)
                message = whole.choices[0].message.to_dict()
            messages.append(message)
            for call in message.get("tool_calls") or []:
                said = call_tool(call["function"]["name"], call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})


async def hold_responses(target: Target, *, stores: bool) -> None:
    """Responses, with all items sent again, or with `previous_response_id`."""
    items: list[Any] = []
    last: str | None = None
    tools = [{"type": "function", **function} for function in _FUNCTIONS]
    async with target.sdk() as client:
        responses: Any = client.responses
        for text, choice, stream in QUESTIONS:
            items.append({"role": "user", "content": text})
            asked: dict[str, Any] = {**_SAMPLING, "store": stores, "tools": tools, "tool_choice": choice}
            asked |= {"input": items, "max_output_tokens": 64, "stream": stream}
            if stores and last:
                asked["previous_response_id"] = last
            response = await responses.create(**asked)
            if stream:
                *_, end = [event async for event in response]
                response = end.response
            last = response.id
            calls = [item for item in response.output if item.type == "function_call"]
            results = [
                {
                    "type": "function_call_output",
                    "call_id": call.call_id,
                    "output": call_tool(call.name, call.arguments),
                }
                for call in calls
            ]
            items = results if stores else [*items, *(i.to_dict() for i in response.output), *results]


async def hold_anthropic(target: Target) -> None:
    """Messages, with a system prompt in cached blocks."""
    tools: list[Any] = [
        {**{n: f[n] for n in ("name", "description", "strict")}, "input_schema": f["parameters"]}
        for f in _FUNCTIONS
    ]
    system: list[Any] = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    messages: list[Any] = []
    results: list[Any] = []
    async with anthropic.AsyncAnthropic(base_url=target.root, api_key="none", max_retries=0) as client:
        for text, choice, stream in QUESTIONS:
            messages.append({"role": "user", "content": [*results, {"type": "text", "text": text}]})
            asked: dict[str, Any] = {"model": MODEL, "max_tokens": 64, "system": system, "tools": tools}
            asked |= {
                "messages": messages,
                "tool_choice": {"type": "any" if choice == "required" else "none"},
                "extra_query": {"beta": "true"},
                "extra_body": {"temperature": 1.2},
            }
            if stream:
                async with client.messages.stream(**asked) as events:
                    answer: Any = await events.get_final_message()
            else:
                answer = await client.messages.create(**asked)
            messages.append({"role": "assistant", "content": answer.content})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": "18"}
                for block in answer.content
                if block.type == "tool_use"
            ]
