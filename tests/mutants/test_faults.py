"""Planted faults: each changes one function of the product, and the test that is named for it must fail.

`faults.yaml` has the list. A fault that no longer applies, or whose test passes with it, is a failure: then
no test shows what it stands for. `make campaign PART=mutants` runs this file.
"""

import ast
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.support.child_environment import python_path_without_torch

_ROOT = Path(__file__).parents[2]
_LEAST = 40
_FAILED = 1
"""The exit code of pytest for tests that ran and failed."""


@dataclass(frozen=True)
class Fault:
    """A change of one function that a test must notice."""

    function: str
    """Its module and qualified name: `tokenproxy.turn.sending:Sender.send`."""
    old: str
    """Text that occurs once in its source, without the indentation of the first line."""
    new: str
    test: str
    """The id of the test that catches it."""

    @property
    def file(self) -> Path:
        """The module's file, relative to the root of the repository."""
        names = self.function.partition(":")[0].split(".")
        module = Path("proxy" if names[0] == "tokenproxy" else "tokenization", *names)
        package = module / "__init__.py"  # a folder alone may be left of a package that became a file
        return package if (_ROOT / package).is_file() else module.with_suffix(".py")

    def planted(self, source: str) -> str:
        """The source of the module with the fault. Raises LookupError if the fault no longer applies."""
        lines = source.splitlines(keepends=True)
        node: ast.AST = ast.parse(source)
        for name in self.function.partition(":")[2].split("."):
            node = next(
                (child for child in getattr(node, "body", ()) if getattr(child, "name", None) == name), None
            ) or _missing(f"no {self.function}")
        start, end = getattr(node, "lineno", 1) - 1, getattr(node, "end_lineno", len(lines))
        function = "".join(lines[start:end])
        if function.count(self.old) != 1:
            _missing(f"{self.function} holds this {function.count(self.old)} times, not once: {self.old}")
        return "".join([*lines[:start], function.replace(self.old, self.new), *lines[end:]])


def _missing(message: str) -> ast.AST:
    raise LookupError(message)


FAULTS = [Fault(**fault) for fault in yaml.safe_load((_ROOT / "tests/mutants/faults.yaml").read_text())]


@pytest.fixture(scope="session")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository's files, in which faults are planted."""
    folder = tmp_path_factory.mktemp("copy")
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    for name in subprocess.check_output(command, cwd=_ROOT, text=True).splitlines():
        if (_ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(_ROOT / name, folder / name)
    if (_ROOT / ".cache").exists():
        (folder / ".cache").symlink_to((_ROOT / ".cache").resolve())
    return folder


def _run(folder: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "tests.support.fast_run"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    environment = {**os.environ, "PYTHONPATH": python_path_without_torch().replace(str(_ROOT), str(folder))}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_there_are_faults_in_every_part_of_the_product() -> None:
    assert len(FAULTS) >= _LEAST
    packages = {path.parent.name for path in (_ROOT / "proxy/tokenproxy").glob("*/__init__.py")}
    planted = {part for fault in FAULTS for part in fault.file.parts}
    assert {*packages, "chat_tokenizer"} - planted == set()


def test_all_named_tests_pass_without_a_fault(copy: Path) -> None:
    run = _run(copy, *dict.fromkeys(fault.test for fault in FAULTS))
    assert run.returncode == 0, run.stdout[-3000:]


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{n}-{fault.function}" for n, fault in enumerate(FAULTS)])
def test_the_fault_is_caught(fault: Fault, copy: Path) -> None:
    file = copy / fault.file
    source = file.read_text()
    file.write_text(fault.planted(source))
    try:
        run = _run(copy, fault.test)
    finally:
        file.write_text(source)
    assert run.returncode == _FAILED, f"survives {fault.test}:\n{run.stdout[-3000:]}"
