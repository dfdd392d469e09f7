"""`tokenproxy key`: a new key, shown once, and its entry in the file."""

import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tokenproxy.cli.key import add_key
from tokenproxy.cli.main import main
from tokenproxy.web.keys import KeyFile, read_keys

Capture = pytest.CaptureFixture[str]


def test_a_key_is_printed_once_and_only_its_digest_is_kept(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "keys.yaml"
    assert main(["key", "trainer", "--file", str(file), "--scope", "inference"]) == 0
    printed = capsys.readouterr()
    [key] = printed.out.splitlines()
    assert re.fullmatch(r"tp-[0-9a-f]{8}-[0-9a-f]{64}", key)
    assert key not in printed.err + file.read_text()
    assert key.rpartition("-")[2] not in file.read_text()
    found = KeyFile(file).find(key.encode())
    assert found is not None and found.scopes == {"turns", "inference"}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_scopes_and_tenant(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    for arguments in (
        ["a"],
        ["b", "--scope", "read", "--tenant", "a"],
        ["c", "--scope", "admin", "--scope", "admin"],
    ):
        assert main(["key", *arguments, "--file", str(file)]) == 0
    entries = {entry.name: (entry.scopes, entry.tenant) for entry in read_keys(file)}
    assert entries == {"a": (["inference", "read"], None), "b": (["read"], "a"), "c": (["admin"], None)}


def test_content_of_the_file_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    first = add_key(file, "a", ["read"], None)
    file.write_text("# ours\n" + file.read_text().rstrip("\n"))
    file.chmod(0o640)
    link = tmp_path / "link.yaml"
    link.symlink_to(file)
    second = add_key(link, "a", ["read"], None)
    assert file.read_text().startswith("# ours\n")
    assert link.is_symlink() and stat.S_IMODE(file.stat().st_mode) == 0o640
    keys = KeyFile(file)
    tenants = {found.tenant for key in (first, second) if (found := keys.find(key.encode()))}
    assert len(tenants) == 1  # a key and its successor of the same name
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["keys.yaml", "link.yaml"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["key", "a b", "--file", "KEYS"], "the name of a key must be"),
        (["key", "a", "--tenant", "x/y", "--file", "KEYS"], "the tenant of a key must be"),
        (["key", "a", "--file", "BROKEN"], "broken.yaml with the new key is not YAML"),
        (["key", "a", "--file", "MISSING/keys.yaml"], "cannot write the key file"),
    ],
)
def test_errors_are_one_line(tmp_path: Path, capsys: Capture, arguments: list[str], words: str) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("- name: [\n")
    places = {"KEYS": str(tmp_path / "keys.yaml"), "BROKEN": str(broken)}
    arguments = [places.get(word, word.replace("MISSING", str(tmp_path / "none"))) for word in arguments]
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert re.search(f"^tokenproxy: .*{words}", printed.err) and printed.out == ""
    assert broken.read_text() == "- name: [\n"
    assert not (tmp_path / "keys.yaml").exists()


def test_runs_at_once_lose_no_key(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    with ThreadPoolExecutor(8) as pool:
        keys = list(pool.map(lambda n: add_key(file, f"k{n}", ["read"], None), range(16)))
    found = KeyFile(file)
    assert all(found.find(key.encode()) for key in keys)
