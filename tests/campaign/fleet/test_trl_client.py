"""TRL's unmodified `VLLMClient` updates the weights of a fleet, as far as that needs no NCCL."""

import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.fake_trained import FakeTrained, Rendezvous
from tests.support.fake_vllm import Canned
from tests.support.talk import user
from tests.support.tiny_model import TinyModel
from tests.support.trl_client import load_client
from tests.support.utils import run_proxy

_STEPS = ("/start_weight_update", "/update_weights", "/finish_weight_update")


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("trl", "vllm", "torch"))), reason="TRL's client needs vLLM"
)
@pytest.mark.filterwarnings("ignore:TRL currently supports")
def test_a_trainer_updates_all_replicas(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    client_class = load_client(monkeypatch)
    rendezvous = Rendezvous(3)  # the trainer is the third
    sent: list[str] = []

    def meet(ranks: list[int]) -> None:
        meeting, until = rendezvous.come(ranks), time.monotonic() + 20
        while not rendezvous.is_complete(meeting):
            assert time.monotonic() < until, "the engines did not come"
            time.sleep(0.002)

    def join(init_info: dict[str, Any]) -> SimpleNamespace:
        meet([0])
        return SimpleNamespace(group=SimpleNamespace(store=1, socket=1))

    def broadcast(iterator: Iterator[tuple[str, Any]], **_: Any) -> None:
        sent.extend(name for name, _ in iterator)
        meet([])

    module = sys.modules[client_class.__module__]
    monkeypatch.setattr(module, "open_trainer_endpoint", join)
    monkeypatch.setattr(module, "packed_nccl_broadcast_producer", broadcast)
    nccl = json.dumps({"vllm_config": {"weight_transfer_config": {"backend": "nccl"}}}).encode()
    with ExitStack() as stack:
        engines = [stack.enter_context(FakeTrained(tiny_model, rendezvous, workers)) for workers in (2, 1)]
        for engine in engines:
            engine.canned["/server_info"] = Canned(nccl, headers={"content-type": "application/json"})
        http = stack.enter_context(run_proxy(engines))
        trl = client_class(base_url=str(http.base_url).rstrip("/"))
        stack.callback(trl.session.close)
        assert trl.get_world_size() == 3
        trl.init_communicator(device="cuda")  # without an index: no device is needed
        assert sorted(rendezvous.ranks) == [0, 1, 2, 3]
        assert [engine.init_info["rank_offset"] for engine in engines] == [1, 3]

        model = torch.nn.Linear(2, 3)
        trl.update_model_params(model)
        expected = {"names": sent, "dtype_names": ["float32"] * 2, "shapes": [[3, 2], [3]]}
        assert sent == ["weight", "bias"]
        assert [engine.update_info for engine in engines] == [expected] * 2
        versions = {engine.version for engine in engines}
        assert len(versions) == 1 and versions != {"default"}  # TRL names none: the proxy does
        with trl.weight_update():
            for name, parameter in model.named_parameters():
                trl.update_named_param(name, parameter.data)
        counts = [[len(engine.seen(path)) for engine in engines] for path in _STEPS]
        assert counts == [[2, 2], [3, 3], [2, 2]]

        trl.reset_prefix_cache()
        assert [engine.cached for engine in engines] == [False, False]
        answer = http.post("/v1/chat/completions", json={"messages": [user("Hi")]})
        samples = http.get(f"/v1/sessions/{answer.headers['x-session-id']}/samples").json()["samples"]
        assert [span[0] for span in samples[0]["turns"][0]["weight_versions"]] == [engines[0].version]
        trl.close_communicator()
