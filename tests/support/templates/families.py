"""The chat templates in the package `trl` and the models they belong to, as data in `families.toml`.

The package has copies from model repositories, and no tokenizers. So the data declare the parts of each
model's tokenizer that matter: special tokens, added tokens that are not special, and the EOS token.
"""

import importlib.metadata
import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Family:
    """Models whose templates and tokenizers follow one format. Lists are separated by spaces."""

    name: str
    templates: str
    special: str
    """Tokens that decoding with `skip_special_tokens` leaves out."""
    eos: str
    bos: str | None = None
    plain: str = ""
    """Added tokens that are not special."""
    rstrip: str = ""
    """Tokens that absorb the white space after them."""
    alternate: str | None = None
    """Another stop token that the model may sample instead of its own."""


_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
FAMILIES = tuple(Family(**fields) for fields in _DATA["family"])

FAMILY_OF = {name: family for family in FAMILIES for name in family.templates.split()}
"""The family of each template of `trl`."""


def template_files() -> dict[str, Path]:
    """The template files of the package `trl` by name. The package is not imported: it would import torch."""
    files = importlib.metadata.files("trl") or []
    paths = (Path(str(file.locate())) for file in files if file.match("trl/chat_templates/*.jinja"))
    return {path.stem: path for path in paths if not path.stem.endswith("_training")}
