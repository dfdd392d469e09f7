"""The environment of processes that tests start."""

import os
from pathlib import Path

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_WITHOUT_TORCH = str(_HERE / "without_torch")
_OURS = [str(_ROOT / "proxy"), str(_ROOT / "tokenization"), str(_ROOT)]


def python_path_without_torch() -> str:
    """A PYTHONPATH with which a process finds this repository, and cannot import torch.

    transformers imports torch wherever it is installed, which takes three seconds in each process.
    """
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [folder for folder in folders if folder not in ("", _WITHOUT_TORCH)]
    return os.pathsep.join([_WITHOUT_TORCH, *(kept or _OURS)])


def python_path_with_torch() -> str:
    """The inverse of `python_path_without_torch`."""
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(folder for folder in folders if folder != _WITHOUT_TORCH)
