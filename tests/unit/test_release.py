"""What a release is built with: links for PyPI, and one range of Python versions everywhere."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

_ROOT = Path(__file__).parents[2]
_URL = "https://git.example/lab/tokenproxy"
_PYTHONS = re.findall(r"Python :: (3\.\d+)", (_ROOT / "pyproject.toml").read_text())


def test_links_are_absolute_on_pypi(tmp_path: Path) -> None:
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(_ROOT / name, tmp_path)
    program = str(_ROOT / "scripts" / "absolute-links")
    subprocess.run([sys.executable, program, _URL, "v1.2.3", str(tmp_path)], check=True)
    readme = (tmp_path / "README.md").read_text()
    picture, page = f"{_URL}/raw/v1.2.3/docs/images/compare.png", f"{_URL}/blob/v1.2.3/docs/viewer.md"
    assert f"]({picture})]({page})" in readme
    assert re.findall(r"\]\((?!https://)[^)]*", readme) == []
    assert f"git clone {_URL} tokenproxy" in readme
    urls = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["urls"]
    assert urls["Source"] == _URL


@pytest.mark.parametrize("name", ["ci", "release"])
def test_workflows_run_every_python(name: str) -> None:
    jobs = yaml.safe_load((_ROOT / ".github" / "workflows" / f"{name}.yml").read_text())["jobs"]
    assert [job["strategy"]["matrix"]["python"] for job in jobs.values() if "strategy" in job] == [_PYTHONS]


def test_the_pages_and_the_installation_name_the_same_pythons() -> None:
    first, last = _PYTHONS[0], _PYTHONS[-1]
    for page in ("README.md", "CONTRIBUTING.md", "docs/versions.md"):
        assert set(re.findall(r"Python (3\.\d+) to (3\.\d+)", (_ROOT / page).read_text())) == {(first, last)}
    install = (_ROOT / "scripts" / "install").read_text()
    [(lowest, above)] = re.findall(r"\(3, (\d+)\) <= sys.version_info < \(3, (\d+)\)", install)
    assert (f"3.{lowest}", f"3.{int(above) - 1}") == (first, last)
    assert f'requires-python = ">={first}"' in (_ROOT / "pyproject.toml").read_text()
    for dockerfile in (_ROOT / "docker").glob("*.Dockerfile"):
        assert set(re.findall(r"FROM python:(3\.\d+)", dockerfile.read_text())) <= set(_PYTHONS)
