"""The pinned lists name what pyproject.toml asks for, each package once."""

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_ROOT = Path(__file__).parents[2]
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
_LISTS = {
    path.stem: [
        Requirement(line) for line in path.read_text().splitlines() if re.match(r"[A-Za-z]", line) is not None
    ]
    for path in sorted((_ROOT / "requirements").glob("*.txt"))
}


def _names(requirements: list[Requirement]) -> set[str]:
    return {canonicalize_name(requirement.name) for requirement in requirements}


def test_a_package_is_in_one_list() -> None:
    count = Counter(name for requirements in _LISTS.values() for name in sorted(_names(requirements)))
    assert [name for name, lists in count.items() if lists > 1] == []


@pytest.mark.parametrize("requirements", _LISTS.values(), ids=_LISTS)
def test_every_package_is_pinned(requirements: list[Requirement]) -> None:
    assert [str(pin) for pin in requirements if [part.operator for part in pin.specifier] != ["=="]] == []


@pytest.mark.parametrize(
    "required, lists",
    [
        (_PROJECT["dependencies"], ["base"]),
        (_PROJECT["optional-dependencies"]["parquet"], ["base"]),
        (_PROJECT["optional-dependencies"]["otel"], ["base"]),
        (_PROJECT["optional-dependencies"]["dev"], ["base", "dev", "clients"]),
        (_PROJECT["optional-dependencies"]["cpu"], ["cpu"]),
        (_PROJECT["optional-dependencies"]["ray"], ["ray"]),
    ],
    ids=["proxy", "parquet", "otel", "dev", "cpu", "ray"],
)
def test_dependencies_of_the_project_are_pinned(required: list[str], lists: list[str]) -> None:
    pins = {canonicalize_name(pin.name): pin for name in lists for pin in _LISTS[name]}
    for requirement in map(Requirement, required):
        (pin,) = pins[canonicalize_name(requirement.name)].specifier
        assert pin.version in requirement.specifier, str(requirement)
