"""A fleet of two real engines whose weights are updated under load.

On a CPU vLLM has no transfer of weights: the rendezvous of `/init_weight_transfer_engine` and
`/update_weights` runs on fakes (tests/fleet/test_weight_calls.py). Everything around it is vLLM's own here.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.demo.stack import EngineProcess
from tests.campaign.real_vllm.conftest import START_TIMEOUT_S, run_proxy, wait_ready
from tests.campaign.real_vllm.plain import CHAT, user
from tests.support.utils import wait_until
from tests.support.viewer.browser import missing_program, run_browser, watched_page

pytestmark = [pytest.mark.timeout(START_TIMEOUT_S + 600), pytest.mark.alone]

DEVELOPMENT = {"VLLM_SERVER_DEV_MODE": "1"}
_STREAMS = 4
_TOKENS = 300


@dataclass(frozen=True)
class Fleet:
    """Engines, and the proxy before them or inside."""

    url: str
    engines: list[EngineProcess]

    def post(self, path: str, body: object = None, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=120, **options)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=120)


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    with ExitStack() as stack:
        engines = [
            stack.enter_context(
                EngineProcess(
                    model, plugin=False, extra_environment=DEVELOPMENT, log_file=folder / f"{number}.log"
                )
            )
            for number in range(2)
        ]
        for engine in engines:
            engine.wait_ready(START_TIMEOUT_S)
            # the first completion of an engine takes long: it must not look like a silence
            body = {"messages": [user("Hi")], "max_tokens": 4}
            httpx.post(engine.url + CHAT, json=body, timeout=300).raise_for_status()
        flags = ("--upstream", engines[1].url, "--store", f"sqlite:///{folder}/turns.db")
        url = stack.enter_context(run_proxy(engines[0].url, *flags, "--watch-interval-s", "1"))
        wait_until(lambda: all(each["ready"] for each in httpx.get(f"{url}/ready").json()["engines"]))
        yield Fleet(url, engines)


class Stream(threading.Thread):
    """Reads one stream of a session of its own, and remembers when each sampled id arrived."""

    def __init__(self, fleet: Fleet, name: str, tokens: int = _TOKENS, *, stream: bool = True) -> None:
        super().__init__(daemon=True)
        self.name = name
        self.arrived: list[float] = []
        self.outcome = ""
        self._fleet = fleet
        self._stream = stream
        self._body = {
            "messages": [user(f"Count. {name}")],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": stream,
            "return_token_ids": True,
        }

    def run(self) -> None:
        headers = {"X-Session-ID": self.name}
        url = self._fleet.url + CHAT
        try:
            if not self._stream:
                self.outcome = str(httpx.post(url, json=self._body, headers=headers, timeout=300).status_code)
                return
            with httpx.stream("POST", url, json=self._body, headers=headers, timeout=300) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        for choice in json.loads(line[6:]).get("choices", []):
                            self.arrived += [time.monotonic()] * len(choice.get("token_ids") or [])
                self.outcome = str(answer.status_code)
        except httpx.HTTPError as error:
            self.outcome = repr(error)

    def turn(self) -> dict[str, Any]:
        """What was recorded."""
        samples = self._fleet.get(f"/v1/sessions/{self.name}/samples").json()["samples"]
        [turn] = samples[0]["turns"]
        found: dict[str, Any] = turn
        return found


def spans_of(turn: dict[str, Any]) -> list[Any]:
    return [[span[0], span[1], span[2]] for span in turn["weight_versions"]]


def test_an_update_under_load(fleet: Fleet) -> None:
    assert fleet.get("/weight_info").json() == {"weight_version": "default"}
    assert fleet.get("/get_world_size").json() == {"world_size": 2}
    streams = [Stream(fleet, f"running-{number}") for number in range(_STREAMS)]
    whole = Stream(fleet, "whole", stream=False)
    for stream in (*streams, whole):
        stream.start()
    wait_until(lambda: all(len(stream.arrived) > 3 for stream in streams), 240)

    assert fleet.post("/pause?mode=keep").json() == {"status": "paused"}
    assert fleet.get("/is_paused").json() == {"is_paused": True}
    assert [httpx.get(f"{engine.url}/is_paused").json()["is_paused"] for engine in fleet.engines] == [
        True
    ] * 2
    time.sleep(0.5)
    frozen = [len(stream.arrived) for stream in streams]
    late = [Stream(fleet, f"late-{number}", 8) for number in range(_STREAMS)]
    for stream in late:
        stream.start()
    time.sleep(6.0)  # longer than a silence that would be suspicious
    assert [len(stream.arrived) for stream in streams] == frozen
    assert not any(stream.arrived or stream.outcome for stream in late)
    assert fleet.post("/update_weight_version", {"new_version": "7"}).json() == {
        "success": True,
        "new_version": "7",
    }
    reset = fleet.post("/reset_prefix_cache")
    assert reset.status_code in (200, 424)  # refused where a frozen request still holds blocks
    assert "success" in reset.text
    assert fleet.get("/ready").json()["weight_version"] == "7"
    assert fleet.post("/resume").json() == {"status": "resumed"}

    for stream in (*streams, *late, whole):
        stream.join(300)
    assert {stream.outcome for stream in (*streams, *late, whole)} == {"200"}
    for stream, count in zip(streams, frozen, strict=True):
        turn = stream.turn()
        assert not turn["weights_uncertain"], turn
        assert spans_of(turn) == [["default", 0, count], ["7", count, _TOKENS]]
    for stream in late:
        assert spans_of(stream.turn()) == [["7", 0, 8]]
    mixed = whole.turn()
    assert mixed["weights_uncertain"]
    assert spans_of(mixed) == [["default", 0, _TOKENS], ["7", 0, _TOKENS]]
    assert all(each["ready"] for each in fleet.get("/ready").json()["engines"])


def test_a_pause_that_aborts(fleet: Fleet) -> None:
    stream = Stream(fleet, "aborted", 400)
    stream.start()
    wait_until(lambda: len(stream.arrived) > 3, 120)
    assert fleet.post("/pause?mode=abort").status_code == 200
    stream.join(60)
    assert stream.outcome == "200" and len(stream.arrived) < 400
    assert fleet.post("/reset_prefix_cache").json() == {"success": True}
    assert fleet.post("/resume").status_code == 200
    assert stream.turn()["finish_reason"] == "abort"


def test_one_replica_that_has_another_version_leaves_and_returns(fleet: Fleet) -> None:
    assert fleet.post("/update_weight_version", {"new_version": "8"}).status_code == 200
    first, second = fleet.engines
    httpx.post(f"{second.url}/update_weight_version", json={"new_version": "0"}).raise_for_status()
    wait_until(lambda: not fleet.get("/ready").json()["engines"][1]["ready"])
    assert "version 0" in fleet.get("/ready").json()["engines"][1]["problem"]
    for number in range(4):
        turn = Stream(fleet, f"alone-{number}", 4)
        turn.run()
        assert spans_of(turn.turn()) == [["8", 0, 4]]
    named = fleet.post("/update_weight_version", {"new_version": "8"}, headers={"X-Replica": second.url})
    assert named.status_code == 200
    wait_until(lambda: fleet.get("/ready").json()["engines"][1]["ready"])
    wait_ready(fleet.url)
    assert first.pid != second.pid


def test_other_calls(fleet: Fleet) -> None:
    assert fleet.post("/reset_mm_cache").status_code == 200
    assert fleet.post("/reset_encoder_cache").status_code == 200
    assert fleet.get("/is_sleeping").json() == {"is_sleeping": False}
    assert fleet.post("/abort_requests", {}).json() == {"status": "aborted", "aborted": 0}
    assert fleet.post("/collective_rpc", {}).status_code == 400
    sums = fleet.post("/weight_checker", {"action": "checksum"})
    assert sums.status_code == 200 and sums.json()["checksums"]  # equal on both
    # nothing transfers weights on a CPU: each refuses, and none leaves service
    refused = fleet.post("/start_weight_update")
    assert refused.status_code in (400, 424, 500)
    assert all(each["ready"] for each in fleet.get("/ready").json()["engines"])
    stream = Stream(fleet, "after", 4)
    stream.run()
    assert stream.outcome == "200"


@pytest.mark.skipif(bool(missing_program()), reason=missing_program() or "no reason")
async def test_the_page_shows_which_weights_sampled(fleet: Fleet) -> None:
    name, versions, messages = "weights-page", ("page-1", "page-2"), [user("Name a colour.")]
    for version in versions:
        assert fleet.post("/update_weight_version", {"new_version": version}).status_code == 200
        asked = {"messages": messages, "max_tokens": 8, "return_token_ids": True}
        answer = fleet.post(CHAT, asked, headers={"X-Session-ID": name}).json()
        messages += [answer["choices"][0]["message"], user("And another one?")]
    first = len(answer["prompt_token_ids"])
    async with run_browser() as browser, watched_page(browser, fleet.url) as viewer:
        for version in versions:
            await viewer.open(f"#/?search={name}&weight_version={version}")
            await viewer.page.wait_for_selector(f".list-row[data-session='{name}']")
        await viewer.open(f"#/s/{name}/-/tokens?token={first}")
        await viewer.page.wait_for_selector(".token.focused.sampled")
        assert "page-2" in await viewer.text(".details")
        await viewer.page.get_by_label("Colours").select_option("weights")
        assert all([version in await viewer.text(".legends") for version in versions])
        assert await viewer.page.locator(".tokens .token.version-0").count() > 0
        assert await viewer.page.locator(".tokens .token.version-1").count() > 0
