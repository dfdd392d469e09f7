"""Whether a template prints the names of messages is found by rendering."""

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
    assert ChatTokenizer.load(tmp_path).nameless_roles == nameless
