"""Keys in a file: what is accepted, and what happens when the file changes."""

import logging
from pathlib import Path

import pytest

from tokenproxy.cli.key import add_key
from tokenproxy.web.keys import KeyFile, KeyFileError, parse_keys

_ENTRY = f"name: a, id: tp-00000000, sha256: '{'0' * 64}', scopes: [read]"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


_SECRET = f"tp-00000000-{'5' * 64}"


@pytest.mark.parametrize("broken", ["", f"- name: {_SECRET}\n  key: [", "\udcff", None])
def test_a_broken_file_keeps_the_old_keys_and_is_logged_once(
    path: Path, caplog: pytest.LogCaptureFixture, broken: str | None
) -> None:
    first = add_key(path, "first", ["read"], None)
    file, good = KeyFile(path), path.read_text()
    if broken is None:
        path.unlink()
    else:
        path.write_bytes(broken.encode("utf-8", "surrogateescape"))
    for _ in range(3):
        file.reload_if_changed()
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert "The keys that were read before stay valid" in record.message and str(path) in record.message
    assert _SECRET not in caplog.text
    assert file.find(first.encode()) is not None
    path.write_text(good)
    second = add_key(path, "second", ["read"], None)
    file.reload_if_changed()
    assert file.find(first.encode()) is not None and file.find(second.encode()) is not None
    for almost in (first[:-1], first + "0", first.upper(), first.rpartition("-")[0], ""):
        assert file.find(almost.encode()) is None
    whole = path.read_text()
    for text in (whole[: whole.rindex("- name")], whole):  # written in place, in two steps
        path.write_text(text)
        file.reload_if_changed()
        assert file.find(second.encode()) is not None
    path.write_text("[]")
    for _ in range(2):
        file.reload_if_changed()
    assert file.find(first.encode()) is None


def test_keys_of_one_name_or_one_tenant_are_one_tenant(path: Path) -> None:
    made = [("first", None), ("first", None), ("reader", "first"), ("stranger", None)]
    keys = [add_key(path, name, ["read"], tenant) for name, tenant in made]
    found = [KeyFile(path).find(key.encode()) for key in keys]
    first, successor, reader, stranger = (key and key.tenant for key in found)
    assert first == successor == reader != stranger


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# nothing\n", "is empty"),
        ("{", r"is not YAML \(line 1\)"),
        ("a: 1", "expected `array`|Expected `array`"),
        (f"- {{{_ENTRY}, more: 1}}", "unknown field"),
        (f"- {{{_ENTRY.replace('[read]', '[]')}}}", "length >= 1"),
        (f"- {{{_ENTRY.replace('tp-00000000', 'other')}}}", "matching regex"),
        (f"- {{{_ENTRY}}}\n- {{{_ENTRY}}}", "two keys with one `id`"),
    ],
)
def test_files_that_cannot_be_used(text: str, words: str) -> None:
    with pytest.raises(KeyFileError, match=f"keys.yaml.*({words})"):
        parse_keys(text, "keys.yaml")
