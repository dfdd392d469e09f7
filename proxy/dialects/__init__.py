"""The wire formats, one file each.

Adding a route is adding a file here, and its test: every `Dialect` found in this package is mounted, inside
vLLM and in front of it.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator

from proxy.dialects.base import Dialect


def all_dialects() -> list[Dialect]:
    """One of each dialect, those that catch everything last."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    kinds = sorted(_concrete(Dialect), key=lambda kind: (kind.catches_all, kind.path))
    return [kind() for kind in kinds]


def _concrete(kind: type) -> Iterator[type[Dialect]]:
    sub: type
    for sub in kind.__subclasses__():
        if not inspect.isabstract(sub):
            yield sub
        yield from _concrete(sub)
