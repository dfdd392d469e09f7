"""The constants and variables that `read_syntax` finds in the source of a template."""

import pytest

from chat_tokenizer.syntax import Syntax, read_syntax

_COMPARED = """
{% if m.content == 'a' %}{% endif %}{% if 'b' in m.content and m.role in ['c', name] %}{% endif %}
{% set tag = 'd' %}{% set tag %}e{% endset %}{% with tag = 'f' %}{{ tag in m.content }}{% endwith %}
{% set ns = namespace(tag='g') %}{% set ns.other = 'h' %}{% set tags = {'i': {'j': 'k'}} %}{{ tags[m.role] }}
{% if m.content.startswith('l') %}{% endif %}{{ m.content | replace('m', '') }}
{% if m.content is equalto 'n' %}{% endif %}{% if '/no' + '_think' in m.content %}{% endif %}
{% macro f(tag) %}{{ tag in m.content }}{% endmacro %}{{ f('o') }}{{ f(tag='p') }}
{% for tag in ['q', 'r'] %}{{ tag in m.content }}{% endfor %}
{% for m in messages | selectattr('role', 'equalto', 's') %}{% if m.role == 't' %}{% break %}
{% endif %}{% endfor %}
"""
_PRINTED = "{{ 'x' }}{{ 'y' + m.content }}z{{ raise_exception('x' + m.role) }}{# {% if m.role == 'x' %} #}"


def test_strings_that_may_decide() -> None:
    assert set(read_syntax(_COMPARED).strings) == {
        *"abcdefghijklmnopqrst",
        "",
        "/no_think",
        "role",
        "equalto",
    }
    assert read_syntax(_PRINTED).strings == ()


@pytest.mark.parametrize(
    "source, numbers",
    [
        ("{% if loop.index > 20 %}{% endif %}{% if loop.index0 % 2 == 1 %}{% endif %}", (1, 2, 20)),
        ("{% if x == -3 %}{% endif %}{{ messages[0].content }}{{ messages[-1].content }}", (0, 1, 3)),
        ("{% if x > 5 * 5 or x > 20.5 %}{% endif %}{% for i in range(9) %}{% endfor %}", (9, 21, 25)),
        ("{% if x > 1e400 %}{% endif %}{{ 12 }}", ()),
    ],
)
def test_numbers(source: str, numbers: tuple[int, ...]) -> None:
    assert read_syntax(source).numbers == numbers


@pytest.mark.parametrize(
    "source, names",
    [
        ("{{ bos_token }}{{ tools }}{{ messages }}{{ raise_exception('x') }}{{ namespace() }}", set()),
        ("{% if add_generation_prompt and y %}{{ strftime_now('%d') }}{% endif %}{{ date }}", {"date", "y"}),
        ("{{ x }}{% set x = 1 %}", {"x"}),
        ("{% set x = x or 1 %}{{ x }}", {"x"}),
        ("{% set x %}{{ y }}{% endset %}{{ x }}", {"y"}),
        ("{% if a %}{% set x = 1 %}{% elif b %}{% else %}{% set x = 2 %}{% endif %}{{ x }}", {"a", "b", "x"}),
        ("{% if a %}{% set x = 1 %}{% else %}{% set x = 2 %}{% endif %}{{ x }}", {"a"}),
        ("{% if x is not defined %}{% set x = 1 %}{% endif %}{{ x }}", {"x"}),
        ("{% for x in y %}{% set z = 1 %}{% endfor %}{{ x }}{{ z }}", {"x", "y", "z"}),
        ("{% for x in y if x %}{{ x }}{% else %}{{ x }}{% endfor %}", {"x", "y"}),
        ("{% macro m(a, b=c) %}{{ a + b }}{% set d = 1 %}{{ d + e }}{% endmacro %}{{ m(f) }}", set("cef")),
        ("{% set x = 1 %}{% macro m() %}{{ x }}{% endmacro %}{{ m() }}", set()),
        ("{% with x = y %}{{ x }}{% endwith %}", {"y"}),
        ("{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x }}", {"x"}),
    ],
)
def test_kwargs_are_the_variables_that_may_be_read_unset(source: str, names: set[str]) -> None:
    assert read_syntax(source).kwargs.keys() == names


def test_kwargs_have_the_constants_that_they_are_compared_with() -> None:
    source = (
        "{% if effort == 'high' or effort in ['low', 3] %}{% endif %}{{ 'y' if 'x' == mode }}"
        "{% if m.role == 'user' and mode %}{% endif %}"
    )
    kwargs = read_syntax("{% set m = messages[0] %}" + source).kwargs
    assert kwargs == {"effort": ("high", "low", 3), "mode": ("x",)}


@pytest.mark.parametrize(
    "source, formats",
    [
        ("{{ strftime_now('%d %B') }}{% if x %}{{ strftime_now('%H') }}{% endif %}", ("%d %B", "%H")),
        ("{{ strftime_now(form) }}", ("%c %f",)),
        ("{% set now = strftime_now %}{{ now('%d') }}", ("%c %f",)),
        ("{{ strftime('%d') }}{{ 'strftime_now' }}", ()),
    ],
)
def test_time_formats(source: str, formats: tuple[str, ...]) -> None:
    assert read_syntax(source).time_formats == formats


def test_template_that_cannot_be_parsed_has_no_syntax() -> None:
    assert read_syntax("{% if %}") == Syntax((), (), (), {}, parsed=False)
