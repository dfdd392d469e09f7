"""What a template does not print is found by rendering."""

from collections.abc import Set
from pathlib import Path

import pytest

from chat_tokenizer import ChatTokenizer
from tests.support.tiny_model import CHATML, make_tiny_model
from tests.support.tiny_templates import HEADER, MESSAGE, chatml

_ALL = {"system", "user", "assistant", "tool"}
_SAYS = "{{ m.content }}"


@pytest.mark.parametrize(
    ("template", "nameless"),
    [
        (CHATML, _ALL),
        (chatml(MESSAGE), _ALL),
        (chatml(HEADER + "{{ m.name }}" + _SAYS), set()),
        (chatml(HEADER + "{% if m.role == 'tool' %}{{ m.name }}{% endif %}" + _SAYS), _ALL - {"tool"}),
        (
            chatml(HEADER + "{% if m.name == 'bob' and m.role == 'user' %}!{% endif %}" + _SAYS),
            _ALL - {"user"},
        ),
        (
            chatml(HEADER + "{% if show and m.role == 'user' %}{{ m.name }}{% endif %}" + _SAYS),
            _ALL - {"user"},
        ),
        (chatml(HEADER + "{% if (m.name or '') | length > 9 %}!{% endif %}" + _SAYS), set()),
        (chatml("{{ m | tojson }}"), set()),
        (chatml("{{ raise_exception('no') }}"), set()),
        (CHATML + "{% if messages | selectattr('name', 'defined') | list %}!{% endif %}", set()),
    ],
)
def test_a_name_counts_if_a_rendering_prints_it(tmp_path: Path, template: str, nameless: Set[str]) -> None:
    make_tiny_model(tmp_path, template)
    assert ChatTokenizer.load(tmp_path).unprinted.names == nameless


def _call(text: str) -> str:
    return _SAYS + "{% for c in m.tool_calls or [] %}{{ c.function.name }}" + text + "{% endfor %}"


def _part(text: str) -> str:
    return "{% for p in m.content %}{{ p.text }}" + text + "{% endfor %}"


@pytest.mark.parametrize(
    ("message", "content_format", "fields", "printed"),
    [
        (_SAYS, "string", {"call", "part"}, set()),
        (_call("{{ loop.index }}"), "string", {"call", "part"}, set()),
        (_call("{{ c.function.strict }}"), "string", {"call", "part"}, {("call", "strict")}),
        (_call("{{ c.function.a.b if c.function.a }}"), "string", {"call", "part"}, {("call", "a")}),
        (_call("{{ '!' if c.get('index') == 'x' }}"), "string", {"call", "part"}, {("call", "index")}),
        (_call("{{ c.function | tojson }}"), "string", {"part"}, set()),
        (_part(""), "openai", {"call", "part"}, set()),
        (_part("{{ '!' if 'image' in p }}"), "openai", {"call", "part"}, {("part", "image")}),
        (_part("{{ p }}"), "openai", {"call"}, set()),
        ("{{ raise_exception('no') }}", "string", set(), set()),
    ],
)
def test_a_field_counts_if_a_rendering_prints_it(
    tmp_path: Path, message: str, content_format: str, fields: Set[str], printed: Set[tuple[str, str]]
) -> None:
    make_tiny_model(tmp_path, chatml(HEADER + message))
    found = ChatTokenizer.load(tmp_path).unprinted
    assert (found.content_format, found.fields, found.printed) == (content_format, fields, printed)
