"""Two keys on one server: nothing of one reaches the other. On real engines, some of which check the keys."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from proxy.demo.stack import EngineProcess
from tests.campaign.real_vllm.conftest import FRONT, INSIDE, START_TIMEOUT_S, run_proxy
from tests.campaign.real_vllm.plain import CHAT, SESSIONS, TOOLS, Conversation, continues, forced, user

_BY_PROXY = "keys of the proxy"
_KEYS = ("anna", "bert")


@dataclass(frozen=True)
class Tenants:
    """A server that knows two keys."""

    url: str

    def client(self, key: str) -> httpx.Client:
        """A client with a key."""
        return httpx.Client(base_url=self.url, timeout=120, headers={"authorization": f"Bearer {key}"})


@pytest.fixture(scope="module", params=[_BY_PROXY, INSIDE, FRONT])
def tenants(
    request: pytest.FixtureRequest,
    engines: dict[str, EngineProcess],
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Tenants]:
    """Keys that the proxy checks, and keys that only the engine does, a stock one or one with the routes."""
    store = ("--store", f"sqlite:///{tmp_path_factory.mktemp('tenants')}/turns.db")
    if request.param == _BY_PROXY:
        flags = (*store, *(flag for key in _KEYS for flag in ("--api-key", key)))
        with run_proxy(engines["stock"].url, *flags, client_key=_KEYS[0]) as url:
            yield Tenants(url)
        return
    # a flag that makes the prompt depend on `tool_choice`
    engine_flags = ["--api-key", *_KEYS, "--exclude-tools-when-tool-choice-none"]
    with EngineProcess(model, plugin=request.param == INSIDE, extra_flags=engine_flags) as engine:
        engine.wait_ready(START_TIMEOUT_S)
        if request.param == INSIDE:
            yield Tenants(engine.url)
            return
        with run_proxy(engine.url, *store, client_key="anna") as url:
            yield Tenants(url)


@pytest.fixture
def anna(tenants: Tenants) -> Iterator[httpx.Client]:
    with tenants.client("anna") as client:
        yield client


@pytest.fixture
def bert(tenants: Tenants) -> Iterator[httpx.Client]:
    with tenants.client("bert") as client:
        yield client


def test_nothing_is_matched_across_tenants(anna: httpx.Client, bert: httpx.Client) -> None:
    talk = Conversation(anna, [user("What is 2 + 2?")], forced(260))
    first = talk.ask()
    other = Conversation(bert, list(talk.messages), forced(260))
    assert other.ask(user("More.")).source == "rendered: no_match"
    assert continues(talk.ask(user("More.")), first)


def test_nothing_is_listed_read_rewarded_or_deleted_across_tenants(
    anna: httpx.Client, bert: httpx.Client
) -> None:
    session = Conversation(anna, [user("What is 3 + 3?")], forced(260)).ask().session
    assert session in {each["id"] for each in anna.get(SESSIONS).json()["data"]}
    assert session not in {each["id"] for each in bert.get(SESSIONS).json()["data"]}
    for method, path, body in (
        ("GET", "", None),
        ("GET", "/samples", None),
        ("POST", "/reward", {"reward": 1.0}),
        ("DELETE", "", None),
    ):
        refused = bert.request(method, f"{SESSIONS}/{session}{path}", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "session_not_found")
    listed = [
        {row["id"] for row in client.get("/viewer/sessions", params={"limit": 500}).json()["data"]}
        for client in (anna, bert)
    ]
    assert session in listed[0] and session not in listed[1]
    for path in ("", "/tokens?turn=x", "/drift?turn=x"):
        refused = bert.get(f"/viewer/sessions/{session}{path}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "session_not_found")
    assert anna.get(f"/viewer/sessions/{session}").status_code == 200
    [sample] = anna.get(f"{SESSIONS}/{session}/samples").json()["samples"]
    assert sample["reward"] is None


def test_retries_get_no_response_of_another_tenant(anna: httpx.Client, bert: httpx.Client) -> None:
    body = {"messages": [user("What is 4 + 4?")], "max_tokens": 2}
    for headers in ({"idempotency-key": "k"}, {"x-session-id": "s", "x-stainless-retry-count": "1"}):
        turns = [
            client.post(CHAT, json=body, headers=headers).headers["x-turn-id"]
            for client in (anna, bert, anna, bert)
        ]
        assert turns == [turns[0], turns[1]] * 2
        assert turns[0] != turns[1]


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer carl"}], ids=["none", "unknown"])
def test_requests_without_a_key_are_refused(tenants: Tenants, headers: dict[str, str]) -> None:
    with httpx.Client(base_url=tenants.url, timeout=60, headers=headers) as client:
        for path in (
            SESSIONS,
            "/sessions",
            f"{SESSIONS}/s/samples",
            "/viewer/sessions",
            "/viewer/sessions/s",
        ):
            assert client.get(path).status_code == 401
        assert client.post(CHAT, json={"messages": [user("Hi")]}).status_code == 401


@pytest.mark.parametrize("tool_choice", ["none", "auto"])
@pytest.mark.parametrize("tenants", [INSIDE, FRONT], indirect=True)
def test_tool_choice_that_the_engine_prints_is_part_of_the_scope(
    anna: httpx.Client, tool_choice: str
) -> None:
    """With `--exclude-tools-when-tool-choice-none` the prompt has no tools."""
    question = user(f"What is 5 + 5? {uuid4().hex}")
    talk = Conversation(anna, [question], {**forced(260), "tools": TOOLS})
    first = talk.ask(tool_choice=tool_choice)
    same = talk.copy()
    assert continues(same.ask(user("More."), tool_choice=tool_choice), first)
    changed = talk.ask(user("More."), tool_choice={"none": "auto", "auto": "none"}[tool_choice])
    assert changed.source.startswith("rendered")
