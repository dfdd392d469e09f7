"""A small and diverse sample of the fetched templates, for the tests.

python -m tests.support.templates.sample   chooses the sample and writes tests/templates/sample.txt

Each step takes the template with the most features that no template before it has. A feature is something
that the syntax tree of a template names: a field, a filter, a test, a variable, a constant.
"""

from collections.abc import Iterator
from pathlib import Path

import jinja2.nodes

from tests.support.templates.corpus import FETCHED, ChatTemplate, corpus

SAMPLE_FILE = Path(__file__).with_name("sample.txt")
_SIZE = 24


def sample_names() -> list[str]:
    """Names of the templates in the sample, the most diverse first."""
    return SAMPLE_FILE.read_text("utf-8").split()


def choose(templates: list[ChatTemplate], size: int) -> list[ChatTemplate]:
    """The templates that together have the most features; the same ones for the same templates."""
    features = {template.name: frozenset(_features(template)) for template in templates}
    chosen: list[ChatTemplate] = []
    seen: frozenset[str] = frozenset()
    rest = sorted(templates, key=lambda template: template.name)
    while rest and len(chosen) < size:
        best = max(rest, key=lambda template: len(features[template.name] - seen))
        chosen.append(best)
        seen |= features[best.name]
        rest.remove(best)
    return chosen


def _features(template: ChatTemplate) -> Iterator[str]:
    if template.tree is None:
        return
    for node in template.tree.find_all(jinja2.nodes.Node):
        if isinstance(node, jinja2.nodes.Getattr):
            yield f"field {node.attr}"
        elif isinstance(node, jinja2.nodes.Filter | jinja2.nodes.Test):
            yield f"{type(node).__name__} {node.name}"
        elif isinstance(node, jinja2.nodes.Const) and len(str(node.value)) < 20:
            yield f"constant {node.value!r}"
    for name in template.variables:
        yield f"variable {name}"


if __name__ == "__main__":
    fetched = [template for template in corpus() if template.source in FETCHED]
    SAMPLE_FILE.write_text("\n".join(template.name for template in choose(fetched, _SIZE)) + "\n")
