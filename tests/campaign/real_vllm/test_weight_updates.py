"""A fleet of two real engines whose weights are updated under load.

On a CPU vLLM has no transfer of weights: the rendezvous of `/init_weight_transfer_engine` and
`/update_weights` runs on fakes (tests/contract/fleet). Everything around it is vLLM's own.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.demo.stack import EngineProcess
from tests.acceptance.formats import CHAT, stream_of, user
from tests.campaign.real_vllm.conftest import START_TIMEOUT_S, ready, replicas, run_proxy, start_engine
from tests.support.quiet import quiet
from tests.support.utils import wait_until

pytestmark = pytest.mark.timeout(START_TIMEOUT_S + 600)

_DEVELOPMENT = {"VLLM_SERVER_DEV_MODE": "1"}
_STREAMS, _TOKENS = 4, 200


@dataclass
class Fleet:
    """Engines, and a client of the proxy before them."""

    http: httpx.Client
    engines: list[EngineProcess]

    def stream(self, session: str, tokens: int, arrived: list[int]) -> int:
        """Read a stream; each sampled id is put into `arrived`. Returns the status."""
        body = {"messages": [user(f"Count. {session}")], "max_tokens": tokens, "ignore_eos": True}
        body |= {"stream": True, "return_token_ids": True}
        with self.http.stream("POST", CHAT, json=body, headers={"x-session-id": session}) as response:
            for event in stream_of(response):
                arrived += [token for choice in event["choices"] for token in choice.get("token_ids") or []]
            return response.status_code

    def turn(self, session: str) -> dict[str, Any]:
        """What was recorded of the only turn of a session."""
        samples = self.http.get(f"/v1/sessions/{session}/samples").json()["samples"]
        [turn] = samples[0]["turns"]
        found: dict[str, Any] = turn
        return found


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    with ExitStack() as stack:
        engines = [
            stack.enter_context(
                start_engine(model, folder / f"{number}.log", plugin=False, environment=_DEVELOPMENT)
            )
            for number in range(2)
        ]
        for engine in engines:
            engine.wait_ready(START_TIMEOUT_S, progress=quiet)
            # the first completion of an engine takes long: it must not look like a silence
            body = {"messages": [user("Hi")], "max_tokens": 4}
            httpx.post(engine.url + CHAT, json=body, timeout=300).raise_for_status()
        flags = ("--upstream", engines[1].url, "--store", f"sqlite:///{folder}/turns.db")
        url = stack.enter_context(run_proxy(engines[0].url, *flags, "--watch-interval-s", "1"))
        http = stack.enter_context(httpx.Client(base_url=url, timeout=300))
        wait_until(lambda: ready(http) == 2)
        yield Fleet(http, engines)


def test_an_update_under_load(fleet: Fleet) -> None:
    http = fleet.http
    assert http.get("/weight_info").json() == {"weight_version": "default"}
    assert http.get("/get_world_size").json() == {"world_size": 2}
    arrived = [list[int]() for _ in range(_STREAMS)]
    with ThreadPoolExecutor(2 * _STREAMS) as threads:
        running = [
            threads.submit(fleet.stream, f"running-{number}", _TOKENS, ids)
            for number, ids in enumerate(arrived)
        ]
        wait_until(lambda: all(len(ids) > 3 for ids in arrived), 240)
        assert http.post("/pause?mode=keep").json() == {"status": "paused"}
        states = [httpx.get(f"{engine.url}/is_paused").json()["is_paused"] for engine in fleet.engines]
        assert states == [True, True]
        late = [threads.submit(fleet.stream, f"late-{number}", 8, []) for number in range(_STREAMS)]
        named = http.post("/update_weight_version", json={"new_version": "7"})
        assert named.json() == {"success": True, "new_version": "7"}
        assert http.post("/reset_prefix_cache").status_code in (200, 424)  # frozen requests may hold blocks
        assert not any(each.done() for each in (*running, *late))
        assert http.post("/resume").json() == {"status": "resumed"}
        assert {each.result() for each in (*running, *late)} == {200}
    for number in range(_STREAMS):
        turn = fleet.turn(f"running-{number}")
        assert {span[0] for span in turn["weight_versions"]} == {"default", "7"}
        if not turn["weights_uncertain"]:
            (_, start, end), (_, resumed, last) = turn["weight_versions"]
            assert (start, end, last) == (0, resumed, _TOKENS)
        assert [span[:3] for span in fleet.turn(f"late-{number}")["weight_versions"]] == [["7", 0, 8]]
    assert ready(http) == 2


def test_a_pause_that_aborts(fleet: Fleet) -> None:
    arrived: list[int] = []
    with ThreadPoolExecutor(1) as threads:
        stream = threads.submit(fleet.stream, "aborted", 2000, arrived)
        wait_until(lambda: len(arrived) > 3, 120)
        assert fleet.http.post("/pause?mode=abort").status_code == 200
        assert stream.result() == 200
    assert fleet.http.post("/resume").status_code == 200
    assert fleet.turn("aborted")["finish_reason"] == "abort"


def test_one_replica_that_has_another_version_leaves_and_returns(fleet: Fleet) -> None:
    first, second = (engine.url for engine in fleet.engines)
    assert fleet.http.post("/update_weight_version", json={"new_version": "8"}).status_code == 200
    httpx.post(f"{second}/update_weight_version", json={"new_version": "0"}).raise_for_status()
    wait_until(lambda: not replicas(fleet.http)[second]["ready"])
    assert fleet.stream("alone", 4, []) == 200
    assert [span[:3] for span in fleet.turn("alone")["weight_versions"]] == [["8", 0, 4]]
    headers = {"X-Replica": second}
    named = fleet.http.post("/update_weight_version", json={"new_version": "8"}, headers=headers)
    assert named.status_code == 200
    wait_until(lambda: replicas(fleet.http)[second]["ready"] and replicas(fleet.http)[first]["ready"])
