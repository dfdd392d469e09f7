"""The session of a request in headers, keys and what coding agents send."""

import pytest

from tokenproxy.base.http import Request
from tokenproxy.web.credentials import tenant_of_key
from tokenproxy.web.parameters import session_name

_UUID = "6bee8b0d-ddd5-4793-b7c0-5bc1349bc7a8"
_CLAUDE = (b"x-claude-code-session-id", _UUID.encode())
_CODEX = (b"session-id", b"01a20484-bd3b")
_OPENCODE = (b"x-session-affinity", b"ses_1")
_KEY = (b"authorization", b"Bearer session-run-7")
_OTHER_KEY = (b"x-api-key", b"sk-very-secret")


def _named(*headers: tuple[bytes, bytes], from_key: bool = False, tenant: str = "") -> str | None:
    return session_name(Request("POST", "/", list(headers), tenant=tenant), from_key=from_key)


@pytest.mark.parametrize(
    ("headers", "from_key", "name"),
    [
        ([_OPENCODE, _CODEX], False, "01a20484-bd3b"),
        ([_OPENCODE, _CODEX, _CLAUDE], False, _UUID),
        ([_CLAUDE, _KEY], False, _UUID),
        ([_CLAUDE, _KEY], True, "session-run-7"),
        ([_CLAUDE, _KEY, (b"x-session-id", b"mine")], True, "mine"),
        ([(b"authorization", b"Basic session-run-7")], True, None),
        ([(b"authorization", b"bearer  session-run-7 ")], True, "session-run-7"),
        ([(b"x-api-key", b"session-run-7")], True, "session-run-7"),
    ],
)
def test_the_first_that_names_one_decides(
    headers: list[tuple[bytes, bytes]], from_key: bool, name: str | None
) -> None:
    assert _named(*headers, from_key=from_key) == name


@pytest.mark.parametrize("key", ["sk-very-secret", "session-é", "Session-1", "session-" + "a" * 200])
def test_a_key_that_may_be_a_secret_is_never_shown(key: str) -> None:
    raw = key.encode("latin-1")
    name = _named((b"x-api-key", raw), from_key=True)
    assert name is not None and name.startswith("key-")
    assert len(name) == len("key-") + 32 and key not in name
    assert name != f"key-{tenant_of_key(raw)}"
    assert _named((b"authorization", b"Bearer " + raw), from_key=True) == name


def test_a_key_that_the_engine_checked_names_no_session() -> None:
    tenant = tenant_of_key(b"session-run-7")
    assert _named(_KEY, from_key=True, tenant=tenant) is None
    assert _named(_KEY, _CLAUDE, from_key=True, tenant=tenant) == _UUID
    assert _named(_KEY, _OTHER_KEY, from_key=True, tenant=tenant) == _named(_OTHER_KEY, from_key=True)


def test_values_of_programs_that_are_no_names_become_digests() -> None:
    names = {_named((b"session-id", value)) for value in (b"a/b", b"a b", b"x" * 500)}
    assert len(names) == 3
    assert all(name and len(name) == 32 for name in names)
