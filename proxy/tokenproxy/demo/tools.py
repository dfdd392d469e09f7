"""The two tools of the demo's conversation: their schemas, and the functions that run them."""

import json

from openai.types.chat import ChatCompletionFunctionToolParam

TOOLS: tuple[ChatCompletionFunctionToolParam, ...] = (
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Current weather in a city",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 24},
                    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Adds, subtracts or multiplies two numbers",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "operator": {"type": "string", "enum": ["+", "-", "*"]},
                    "b": {"type": "integer"},
                },
                "required": ["a", "operator", "b"],
                "additionalProperties": False,
            },
        },
    },
)


def call_tool(name: str, arguments: str) -> str:
    """Run a tool on the model's JSON `arguments`; returns the result, or `{"error": ...}`, as JSON text."""
    try:
        values = json.loads(arguments)
        if name == "get_weather":
            return json.dumps({"city": values["city"], "temperature": 18, "sky": "light rain"})
        if name == "calculator":
            return json.dumps({"value": _calculate(values["a"], values["operator"], values["b"])})
    except (ValueError, KeyError, TypeError) as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"})
    return json.dumps({"error": f"unknown tool: {name}"})


def _calculate(a: int, operator: str, b: int) -> int:
    match operator:
        case "+":
            return a + b
        case "-":
            return a - b
        case "*":
            return a * b
    raise ValueError(f"unknown operator {operator}")
