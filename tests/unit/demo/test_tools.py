import json

import pytest

from proxy.demo.tools import TOOLS, call_tool


@pytest.mark.parametrize(("operator", "value"), [("+", 25), ("-", 11), ("*", 126)])
def test_calculator(operator, value):
    result = call_tool("calculator", json.dumps({"a": 18, "operator": operator, "b": 7}))
    assert json.loads(result) == {"value": value}


def test_weather_names_the_city():
    assert json.loads(call_tool("get_weather", '{"city": "Oslo", "unit": "celsius"}'))["city"] == "Oslo"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("calculator", '{"a": 18, "operator": "*"'),
        ("calculator", "{}"),
        ("calculator", "[]"),
        ("calculator", '{"a": 1, "operator": "^", "b": 2}'),
        ("calculator", '{"a": "x", "operator": "-", "b": "y"}'),
        ("get_weather", "{}"),
        ("search", "{}"),
    ],
)
def test_invalid_calls_return_an_error_result(name, arguments):
    assert "error" in json.loads(call_tool(name, arguments))


def test_every_declared_tool_is_implemented():
    for tool in TOOLS:
        assert "unknown tool" not in call_tool(tool["function"]["name"], "{}")
