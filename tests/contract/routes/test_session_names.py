"""Which session a request belongs to: headers, keys and what coding agents send."""

import secrets
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from proxy.http import Request
from proxy.routes.credentials import tenant_of_key
from proxy.routes.session_names import session_name
from tests.support.fake_vllm import FakeVllm
from tests.support.talk import CHAT, user
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_proxy

_UUID = "6bee8b0d-ddd5-4793-b7c0-5bc1349bc7a8"
_CLAUDE = (b"x-claude-code-session-id", _UUID.encode())
_CODEX = (b"session-id", b"01a20484-bd3b")
_OPENCODE = (b"x-session-affinity", b"ses_1")
_OWN = (b"x-session-id", b"mine")
_KEY = (b"authorization", b"Bearer session-run-7")
_OTHER_KEY = (b"x-api-key", b"sk-very-secret")


def _named(*headers: tuple[bytes, bytes], from_key: bool = False, tenant: str = "") -> str | None:
    return session_name(Request("POST", "/", list(headers), tenant=tenant), from_key=from_key)


@pytest.mark.parametrize(
    "headers, from_key, name",
    [
        ([], True, None),
        ([_CLAUDE], False, _UUID),
        ([_CODEX], False, "01a20484-bd3b"),
        ([_OPENCODE], False, "ses_1"),
        ([_OPENCODE, _CODEX, _CLAUDE], False, _UUID),
        ([_OPENCODE, _CODEX], False, "01a20484-bd3b"),
        ([_CLAUDE, _KEY], False, _UUID),
        ([_CLAUDE, _KEY], True, "session-run-7"),
        ([_CLAUDE, _KEY, _OWN], True, "mine"),
        ([(b"authorization", b"Basic session-run-7")], True, None),
        ([(b"authorization", b"session-run-7")], True, None),
        ([(b"authorization", b"bearer  session-run-7 ")], True, "session-run-7"),
        ([(b"x-api-key", b"session-run-7")], True, "session-run-7"),
        ([(b"x-api-key", b"")], True, None),
        ([(b"x-claude-code-session-id", b" ")], False, None),
    ],
)
def test_the_first_that_names_one_decides(
    headers: list[tuple[bytes, bytes]], from_key: bool, name: str | None
) -> None:
    assert _named(*headers, from_key=from_key) == name


@pytest.mark.parametrize(
    "key", ["sk-very-secret", "session-a/b", "session-é", "Session-1", "session-" + "a" * 200]
)
def test_a_key_that_may_be_a_secret_is_never_shown(key: str) -> None:
    name = _named((b"x-api-key", key.encode("latin-1")), from_key=True)
    assert name is not None and name.startswith("key-")
    assert len(name) == len("key-") + 32 and key not in name
    assert name != f"key-{tenant_of_key(key.encode('latin-1'))}"
    assert _named((b"authorization", b"Bearer " + key.encode("latin-1")), from_key=True) == name


def test_a_key_that_the_engine_checked_names_no_session() -> None:
    tenant = tenant_of_key(b"session-run-7")
    assert _named(_KEY, from_key=True, tenant=tenant) is None
    assert _named(_KEY, _CLAUDE, from_key=True, tenant=tenant) == _UUID
    assert _named(_KEY, _OTHER_KEY, from_key=True, tenant=tenant) == _named(_OTHER_KEY, from_key=True)


def test_values_of_programs_that_are_no_names_become_digests() -> None:
    names = {_named((b"session-id", value)) for value in (b"a/b", b"a b", b"x" * 500)}
    assert len(names) == 3
    assert all(name and len(name) == 32 for name in names)


@pytest.fixture
def keyed(tiny_model: TinyModel) -> Iterator[tuple[FakeVllm, httpx.Client]]:
    with (
        FakeVllm(tiny_model) as fake,
        run_proxy([fake], session_from_key=True, api_key=["ALICE"], store="memory:") as client,
    ):
        yield fake, client


def _ask(client: httpx.Client, headers: Any) -> httpx.Response:
    answer = client.post(
        CHAT,
        json={"messages": [user(f"Hi {secrets.token_hex(4)}")]},
        headers={k.decode(): v for k, v in headers},
    )
    assert answer.status_code == 200, answer.text
    return answer


def test_a_key_that_the_proxy_checked_names_no_session(keyed: tuple[FakeVllm, httpx.Client]) -> None:
    _, client = keyed
    alice = (b"authorization", b"Bearer ALICE")
    one, two = (_ask(client, [alice]).headers["x-session-id"] for _ in range(2))
    assert one != two and not one.startswith("key-")
    named = _ask(client, [alice, (b"x-api-key", b"session-run-7")])
    assert named.headers["x-session-id"] == "session-run-7"
    session = client.get("/v1/sessions/session-run-7", headers={"authorization": "Bearer ALICE"}).json()
    assert (session["explicit"], session["turn_count"]) == (True, 1)


def test_a_made_session_is_used_with_its_id_as_key(fake: FakeVllm) -> None:
    with run_proxy([fake], session_from_key=True) as client:
        made = client.post("/v1/sessions", json={"overrides": {"temperature": 0.25}}).json()["id"]
        answer = _ask(client, [(b"authorization", f"Bearer {made}".encode())])
    assert answer.headers["x-session-id"] == made
    seen = [request.json for request in fake.requests if request.path == CHAT]
    assert seen[-1]["temperature"] == 0.25


def test_what_coding_agents_send_names_explicit_sessions(client: httpx.Client, fake: FakeVllm) -> None:
    name = secrets.token_hex(8)
    for header in (b"x-claude-code-session-id", b"session-id", b"x-session-affinity"):
        assert _ask(client, [(header, name.encode())]).headers["x-session-id"] == name
    session = client.get(f"/v1/sessions/{name}").json()
    assert (session["explicit"], session["turn_count"]) == (True, 3)
