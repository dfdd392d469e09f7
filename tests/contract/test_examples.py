"""The examples without a server: help texts, the table in their README, and errors."""

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ports import held_port
from tests.support.tiny_model import TinyModel

_FOLDER = Path(__file__).parents[2] / "examples"
_FLAGS = {
    "agent.py": {"--url", "--model", "--stream", "--session"},
    "environment.py": {"--url", "--model", "--turns", "--seed"},
    "environment_async.py": {"--url", "--model", "--tokenizer", "--games", "--turns"},
    "trainer.py": {"--url", "--model", "--rollouts", "--turns", "--consumer"},
}

every_example = pytest.mark.parametrize("name", sorted(_FLAGS))


def test_every_example_is_tested_and_in_the_readme() -> None:
    rows = re.findall(r"(?m)^\| \[(\S+)\]\(\1\) \|", (_FOLDER / "README.md").read_text())
    assert sorted(rows) == sorted(_FLAGS) == sorted(path.name for path in _FOLDER.glob("*.py"))


@every_example
def test_example_imports_only_public_packages(name: str) -> None:
    imported = re.findall(r"(?m)^(?:from|import) (tokenproxy\.\w+|\w+)", (_FOLDER / name).read_text())
    assert set(imported) - sys.stdlib_module_names <= {"openai", "tokenproxy.client", "chat_tokenizer"}


@every_example
def test_help_shows_description_flags_and_defaults(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(_FOLDER / name), "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(sys.argv[0], run_name="__main__")
    shown = capsys.readouterr().out
    assert set(re.findall(r"(?m)^  (?:-h, )?(--\w+)", shown)) == _FLAGS[name] | {"--help"}
    description = ast.get_docstring(ast.parse((_FOLDER / name).read_text()))
    for words in (str(description), "http://127.0.0.1:8100", "smollm2"):
        assert words in shown


@every_example
def test_missing_server_is_a_one_line_error(name: str, tiny_model: TinyModel) -> None:
    with held_port() as port:
        url = f"http://127.0.0.1:{port}"
        given = ["--tokenizer", str(tiny_model.folder)] if "--tokenizer" in _FLAGS[name] else []
        run = subprocess.run(
            [sys.executable, str(_FOLDER / name), "--url", url, *given],
            # without torch, transformers prints an advisory to stderr
            env=os.environ | {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert run.stderr == f"{name}: no server at {url}: start one, or pass --url\n"
        assert (run.returncode, run.stdout) == (2, "")
