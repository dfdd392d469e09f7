"""Keys that only the engine knows (`--api-key`): nothing of one tenant reaches the other."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.campaign.real_vllm.conftest import FRONT, INSIDE, START_TIMEOUT_S, forced, run_proxy, start_engine
from tests.support.recorded import SESSIONS
from tests.support.talk import CHAT, Conversation, user

_KEYS = ("anna", "bert")


@pytest.fixture(scope="module", params=[INSIDE, FRONT])
def url(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    folder, inside = tmp_path_factory.mktemp("tenants"), request.param == INSIDE
    with start_engine(model, folder / "vllm.log", "--api-key", *_KEYS, plugin=inside) as engine:
        engine.wait_ready(START_TIMEOUT_S)
        if inside:
            yield engine.url
            return
        with run_proxy(engine.url, "--store", f"sqlite:///{folder}/turns.db", client_key="anna") as front:
            yield front


@pytest.mark.timeout(START_TIMEOUT_S + 120)
def test_nothing_of_a_tenant_reaches_another(url: str) -> None:
    anna, bert = (
        httpx.Client(base_url=url, timeout=120, headers={"authorization": f"Bearer {key}"}) for key in _KEYS
    )
    with anna, bert:
        talk = Conversation(anna, [user("What is 2 + 2?")], forced(260))
        first = talk.ask()
        other = Conversation(bert, list(talk.messages), forced(260))
        assert other.ask(user("More.")).source == "rendered: no_match"
        assert talk.ask(user("More.")).continues(first)
        listed = [{each["id"] for each in client.get(SESSIONS).json()["data"]} for client in (anna, bert)]
        assert first.session in listed[0] and first.session not in listed[1]
        refused = bert.get(f"{SESSIONS}/{first.session}/samples")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "session_not_found")
    with httpx.Client(base_url=url, timeout=60, headers={"authorization": "Bearer carl"}) as stranger:
        assert [stranger.get(path).status_code for path in (SESSIONS, "/viewer/sessions")] == [401, 401]
        assert stranger.post(CHAT, json={"messages": [user("Hi")]}).status_code == 401
