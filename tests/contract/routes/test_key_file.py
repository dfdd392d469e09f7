"""Keys in a file: what is accepted, and what happens when the file changes while the proxy runs."""

import hashlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from proxy.key_command import add_key
from proxy.routes.key_file import KeyFile, KeyFileError, new_key, parse_keys
from proxy.routes.scopes import KeyScope
from tests.support.fake_vllm import FakeVllm
from tests.support.talk import user
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_proxy, wait_until

_ENTRY = f"name: a, id: tp-00000000, sha256: '{'0' * 64}', scopes: [read]"
_CHAT = "/v1/chat/completions"
_BODY = {"messages": [user("Hi")]}


@dataclass(frozen=True)
class Keyed:
    """A proxy with keys in a file."""

    client: httpx.Client
    file: Path
    key: str
    """Of the name `first`, with the scopes inference and read."""

    def status(self, key: str, path: str = "/v1/sessions") -> int:
        return self.client.get(path, headers={"authorization": f"Bearer {key}"}).status_code


@pytest.fixture
def keyed(tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keyed]:
    monkeypatch.setattr("proxy.routes.key_file.CHECK_S", 0.01)
    file = tmp_path / "keys.yaml"
    key = add_key(file, "first", ["inference", "read"], None)
    with (
        FakeVllm(tiny_model) as engine,
        run_proxy([engine], reader=key, api_key_file=file, store="memory:") as client,
    ):
        yield Keyed(client, file, key)


def test_a_new_key_works_without_a_restart_and_a_deleted_one_ends(keyed: Keyed) -> None:
    second = add_key(keyed.file, "second", ["read"], None)
    wait_until(lambda: keyed.status(second) == 200)
    keyed.file.write_text(keyed.file.read_text().partition("- name: second")[0])
    wait_until(lambda: keyed.status(second) == 401)
    assert keyed.status(keyed.key) == 200
    keyed.file.write_text("[]")
    wait_until(lambda: keyed.status(keyed.key) == 401)


@pytest.mark.parametrize("broken", ["", "- name: [", "- {}", "keys: 1", "\udcff", None])
def test_a_broken_file_keeps_the_old_keys_and_is_logged(
    keyed: Keyed, caplog: pytest.LogCaptureFixture, broken: str | None
) -> None:
    good = keyed.file.read_text()
    if broken is None:
        keyed.file.unlink()
    else:
        new = keyed.file.with_suffix(".new")
        new.write_bytes(broken.encode("utf-8", "surrogateescape"))
        new.replace(keyed.file)
    wait_until(lambda: "The keys that were read before stay valid" in caplog.text)
    assert str(keyed.file) in caplog.text
    assert keyed.status(keyed.key) == 200
    time.sleep(0.1)  # several looks at the file
    assert sum("stay valid" in record.message for record in caplog.records) == 1  # not once a second
    keyed.file.write_text(good)
    second = add_key(keyed.file, "second", ["read"], None)
    wait_until(lambda: keyed.status(second) == 200)


def test_no_secret_is_logged(keyed: Keyed, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = f"tp-00000000-{'5' * 64}"
    keyed.file.write_text(f"- name: {secret}\n  key: [")
    wait_until(lambda: "stay valid" in caplog.text)
    keyed.status("not-ours-4711")
    assert secret not in caplog.text and "4711" not in caplog.text


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
def test_both_headers(keyed: Keyed, header: str) -> None:
    value = f"Bearer {keyed.key}" if header == "authorization" else keyed.key
    assert keyed.client.post(_CHAT, json=_BODY, headers={header: value}).status_code == 200


def test_keys_of_one_name_or_one_tenant_share_their_recordings(keyed: Keyed) -> None:
    successor = add_key(keyed.file, "first", ["read"], None)
    reader = add_key(keyed.file, "reader", ["read"], "first")
    stranger = add_key(keyed.file, "stranger", ["read"], None)
    wait_until(lambda: keyed.status(stranger) == 200)
    headers = {"authorization": f"Bearer {keyed.key}", "x-session-id": "shared"}
    assert keyed.client.post(_CHAT, json=_BODY, headers=headers).status_code == 200
    seen = [keyed.status(key, "/v1/sessions/shared") for key in (keyed.key, successor, reader, stranger)]
    assert seen == [200, 200, 200, 404]


@pytest.mark.parametrize("change", [lambda key: key[:-1], lambda key: key + "0", str.upper])
def test_almost_a_key_is_none(keyed: Keyed, change: object) -> None:
    assert callable(change)
    assert keyed.status(change(keyed.key)) == 401
    assert keyed.status(keyed.key.rpartition("-")[0]) == 401


def test_the_id_is_part_of_the_digest() -> None:
    key, entry = new_key("a", [KeyScope.READ])
    assert entry.sha256 == hashlib.sha256(key.encode()).hexdigest()
    assert key.startswith(f"{entry.id}-")
    assert new_key("a", [KeyScope.READ])[0] != key


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("{", r"is not YAML \(line 1\)"),
        ("a: 1", "expected `array`|Expected `array`"),
        ("- 1", "object"),
        ("- {name: a}", "missing required field"),
        (f"- {{{_ENTRY}, more: 1}}", "unknown field"),
        (f"- {{{_ENTRY.replace('[read]', '[]')}}}", "length >= 1"),
        (f"- {{{_ENTRY.replace('[read]', '[all]')}}}", "Invalid enum value"),
        (f"- {{{_ENTRY.replace('tp-00000000', 'other')}}}", "matching regex"),
        (f"- {{{_ENTRY.replace('0' * 64, 'secret')}}}", "matching regex"),
        (f"- {{{_ENTRY.replace('name: a', 'name: a/b')}}}", "matching regex"),
        (f"- {{{_ENTRY}}}\n- {{{_ENTRY}}}", "two keys with one `id`"),
    ],
)
def test_files_that_cannot_be_used(text: str, words: str) -> None:
    with pytest.raises(KeyFileError, match=f"keys.yaml.*({words})"):
        parse_keys(text, "keys.yaml")


def test_file_without_keys_accepts_no_key(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("[]")
    assert KeyFile(file).find(b"tp-00000000-x") is None


def test_dates_may_be_written_by_hand() -> None:
    for date in ("2026-01-02", "'2026-01-02'"):
        [entry] = parse_keys(f"- {{{_ENTRY}, created: {date}}}", "keys.yaml")
        assert entry.created is not None and entry.created.year == 2026
