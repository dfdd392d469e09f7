"""The proxy reads its key file again while it runs; `tests/unit/routes` has the file itself."""

from pathlib import Path

import pytest

from proxy.key_command import add_key
from tests.support.fake_vllm import FakeVllm
from tests.support.utils import run_proxy, wait_until


def test_a_new_key_works_without_a_restart_and_a_deleted_one_ends(
    mortal: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.routes.key_file.CHECK_S", 0.01)
    file = tmp_path / "keys.yaml"
    first = add_key(file, "first", ["read"], None)
    with run_proxy([mortal], reader=first, api_key_file=file, store="memory:") as client:

        def status(key: str) -> int:
            return client.get("/v1/sessions", headers={"authorization": f"Bearer {key}"}).status_code

        second = add_key(file, "second", ["read"], None)
        wait_until(lambda: status(second) == 200)
        file.write_text(file.read_text().partition("- name: second")[0])
        wait_until(lambda: status(second) == 401)
        assert status(first) == 200
