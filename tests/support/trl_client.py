"""TRL's own client of a vLLM server, unmodified.

The module is loaded without the `__init__` of its packages, which import what only training needs (pandas).
"""

import importlib
import importlib.util
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def load_client(patch: pytest.MonkeyPatch) -> Any:
    """The class `VLLMClient`. What was imported for it is forgotten when `patch` is undone."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    for name, path in (("trl", folder), ("trl.generation", folder / "generation")):
        package = ModuleType(name)
        package.__path__ = [str(path)]
        patch.setitem(sys.modules, name, package)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it knows vLLM up to 0.31
        return importlib.import_module("trl.generation.vllm_client").VLLMClient
