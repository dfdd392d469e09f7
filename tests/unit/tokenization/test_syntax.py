"""The constants and variables that `read_syntax` finds in the source of a template."""

import pytest

from tokenization.syntax import Syntax, read_syntax

_STRINGS = {
    "comparison": ("{% if m.content == 'x' %}{% endif %}", {"x"}),
    "membership": ("{% if 'x' in m.content %}{% endif %}", {"x"}),
    "member of a list": ("{% if m.role in ['x', name] %}{% endif %}", {"x"}),
    "set": ("{% set tag = 'x' %}{% if tag in m.content %}{% endif %}", {"x"}),
    "set block": ("{% set tag %}x{% endset %}{% if tag in m.content %}{% endif %}", {"x"}),
    "with": ("{% with tag = 'x' %}{{ tag in m.content }}{% endwith %}", {"x"}),
    "namespace": ("{% set ns = namespace(tag='x') %}{% set ns.other = 'y' %}", {"x", "y"}),
    "dict": ("{% set tags = {'x': {'y': 'z'}} %}{{ tags[m.role] }}", {"x", "y", "z"}),
    "method startswith": ("{% if m.content.startswith('x') %}{% endif %}", {"x"}),
    "filter": ("{{ m.content | replace('x', '') }}", {"x", ""}),
    "test": ("{% if m.content is equalto 'x' %}{% endif %}", {"x"}),
    "argument of a macro": (
        "{% macro f(tag) %}{{ tag in m.content }}{% endmacro %}{{ f('x') }}{{ f(tag='y') }}",
        {"x", "y"},
    ),
    "loop over a list": ("{% for tag in ['x', 'y'] %}{{ tag in m.content }}{% endfor %}", {"x", "y"}),
    "loop over a filter": (
        "{% for m in messages | selectattr('role', 'equalto', 'x') %}{% endfor %}",
        {"role", "equalto", "x"},
    ),
    "folded constant": ("{% if '/no' + '_think' in m.content %}{% endif %}", {"/no_think"}),
    "loop control": (
        "{% for m in messages %}{% if m.role == 'x' %}{% break %}{% endif %}{% endfor %}",
        {"x"},
    ),
    "only printed": ("{{ 'x' }}{{ 'y' + m.content }}z", set()),
    "text of an error": ("{{ raise_exception('x' + m.role) }}{{ strftime_now('%d') }}", set()),
    "comment": ("{# {% if m.role == 'x' %} #}", set()),
}


@pytest.mark.parametrize("source, strings", _STRINGS.values(), ids=_STRINGS)
def test_strings(source: str, strings: set[str]) -> None:
    assert set(read_syntax(source).strings) == strings


_NUMBERS = {
    "comparison": ("{% if loop.index > 20 %}{% endif %}", (20,)),
    "modulo": ("{% if loop.index0 % 2 == 1 %}{% endif %}", (1, 2)),
    "negative": ("{% if x == -3 %}{% endif %}", (3,)),
    "index": ("{{ messages[0].content }}{{ messages[-1].content }}", (0, 1)),
    "folded": ("{% if messages | length > 5 * 5 %}{% endif %}", (25,)),
    "fraction": ("{% if messages | length > 20.5 %}{% endif %}", (21,)),
    "argument": ("{% for i in range(9) %}{% endfor %}", (9,)),
    "beyond a float": ("{% if x > 1e400 %}{% endif %}", ()),
    "only printed": ("{{ 12 }}", ()),
}


@pytest.mark.parametrize("source, numbers", _NUMBERS.values(), ids=_NUMBERS)
def test_numbers(source: str, numbers: tuple[int, ...]) -> None:
    assert read_syntax(source).numbers == numbers


@pytest.mark.parametrize(
    "source, names",
    [
        ("{{ bos_token }}{{ tools }}{{ messages }}{{ raise_exception('x') }}{{ namespace() }}", set()),
        ("{% if add_generation_prompt and y %}{{ strftime_now('%d') }}{% endif %}{{ date }}", {"date", "y"}),
        ("{% set x = 1 %}{{ x }}", set()),
        ("{{ x }}{% set x = 1 %}", {"x"}),
        ("{% set x = x or 1 %}{{ x }}", {"x"}),
        ("{% set x %}{{ y }}{% endset %}{{ x }}", {"y"}),
        ("{% if a %}{% set x = 1 %}{% endif %}{{ x }}", {"a", "x"}),
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
