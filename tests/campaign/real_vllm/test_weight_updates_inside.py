"""The versions of turns inside vLLM: the plugin observes vLLM's own development routes."""

import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from proxy.demo.stack import EngineProcess
from tests.campaign.real_vllm.conftest import START_TIMEOUT_S, wait_ready
from tests.campaign.real_vllm.test_weight_updates import DEVELOPMENT, Fleet, Stream, spans_of
from tests.support.utils import wait_until

pytestmark = pytest.mark.timeout(START_TIMEOUT_S + 600)

_TOKENS = 200


@pytest.fixture(scope="module")
def inside(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("inside")
    environment = {**DEVELOPMENT, "TOKENPROXY_STORE": f"sqlite:///{folder}/turns.db"}
    with EngineProcess(model, extra_environment=environment, log_file=folder / "vllm.log") as engine:
        engine.wait_ready(START_TIMEOUT_S)
        wait_ready(engine.url)
        yield Fleet(engine.url, [engine])


def test_versions_inside_vllm(inside: Fleet) -> None:
    """Where vLLM's event loop was too busy to see when an id arrived, its turn says so: then once more."""
    assert inside.get("/weight_info").json() == {"weight_version": "default"}
    for before, after in pairwise(["default", "1", "2", "3", "4"]):
        if _update(inside, before, after):
            return
    pytest.fail("no position was known")


def _update(inside: Fleet, before: str, after: str) -> bool:
    """Set a version while a stream is paused; returns whether the position in the stream was known."""
    stream = Stream(inside, f"running-{after}", _TOKENS)
    stream.start()
    wait_until(lambda: len(stream.arrived) > 3, 240)
    assert inside.post("/pause?mode=keep").json() == {"status": "paused"}
    time.sleep(0.5)
    frozen = len(stream.arrived)
    late = Stream(inside, f"late-{after}", 4)
    late.start()
    time.sleep(1.0)
    named = inside.post("/update_weight_version", {"new_version": after})
    assert named.json() == {"success": True, "new_version": after}
    assert (len(stream.arrived), late.outcome) == (frozen, "")
    assert inside.post("/resume").json() == {"status": "resumed"}
    for each in (stream, late):
        each.join(300)
        assert each.outcome == "200"
    assert after in {span[0] for span in spans_of(late.turn())}
    turn = stream.turn()
    if turn["weights_uncertain"]:
        assert spans_of(turn) == [[before, 0, _TOKENS], [after, 0, _TOKENS]]
        return False
    assert spans_of(turn) == [[before, 0, frozen], [after, frozen, _TOKENS]]
    assert spans_of(late.turn()) == [[after, 0, 4]]
    return True


def test_routes_inside_vllm_keep_their_contract(inside: Fleet) -> None:
    assert inside.get("/get_world_size").json() == {"world_size": 1}
    assert inside.get("/is_paused").json() == {"is_paused": False}
    assert inside.post("/reset_prefix_cache").json() == {"success": True}
    assert inside.post("/v1/load_lora_adapter", {}).status_code == 404  # not enabled
    assert inside.get("/ready").json()["engines"][0]["weight_version"] != "default"
