import jinja2
import pytest

from tokenization.syntax import read_syntax
from tokenization.variables import variables_of_request

_SOURCES = {
    "{{ x }}": {"x"},
    "{% set x = 1 %}{{ x }}": set(),
    "{{ x }}{% set x = 1 %}": {"x"},
    "{% set x = x or 1 %}{{ x }}": {"x"},
    "{% set x = 1 %}{% set x.y = z %}": {"z"},
    "{% set x %}{{ y }}{% endset %}{{ x }}": {"y"},
    "{% if a %}{% set x = 1 %}{% endif %}{{ x }}": {"a", "x"},
    "{% if a %}{% set x = 1 %}{% elif b %}{% else %}{% set x = 2 %}{% endif %}{{ x }}": {"a", "b", "x"},
    "{% if a %}{% set x = 1 %}{% else %}{% set x = 2 %}{% endif %}{{ x }}": {"a"},
    "{% if x is not defined %}{% set x = 1 %}{% endif %}{{ x }}": {"x"},
    "{% for x in y %}{% set z = 1 %}{% endfor %}{{ x }}{{ z }}": {"x", "y", "z"},
    "{% for x in y if x %}{{ x }}{% else %}{{ x }}{% endfor %}": {"x", "y"},
    "{% macro m(a, b=c) %}{{ a + b }}{% set d = 1 %}{{ d + e }}{% endmacro %}{{ m(f) }}": {"c", "e", "f"},
    "{% set x = 1 %}{% macro m() %}{{ x }}{% endmacro %}{{ m() }}": set(),
    "{% with x = y %}{{ x }}{% endwith %}": {"y"},
}


@pytest.mark.parametrize("source, names", _SOURCES.items())
def test_variables_of_the_request_are_those_that_may_be_read_unset(source: str, names: set[str]) -> None:
    assert variables_of_request(jinja2.Environment().parse(source)) == names


def test_generation_block_sets_nothing_for_what_follows_it() -> None:
    source = "{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}"
    assert read_syntax(source).kwargs == {}
    assert read_syntax(source + "{{ x }}").kwargs.keys() == {"x"}
