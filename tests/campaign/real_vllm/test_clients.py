"""Clients that nobody here wrote hold conversations, with only their base URL changed: no id drifts."""

import sys
from pathlib import Path
from uuid import uuid4

import pytest

from tests.acceptance.conftest import Server
from tests.campaign.real_vllm.clients.programs import run_program
from tests.campaign.real_vllm.clients.sdks import hold_openai
from tests.campaign.real_vllm.clients.table import ROOT, Target, clients
from tests.campaign.real_vllm.conftest import only_in_front, only_inside
from tests.support.recorded import record_of

RLLM = ROOT / ".cache" / "rllm-model-gateway" / "bin" / "python"
TRL = ROOT / ".cache" / "trl-1.10"
_SCRIPTS = Path(__file__).parent / "clients"
_CLIENTS = clients()
_CALLS_NO_TOOLS = ("TRL",)


@pytest.mark.parametrize("name", _CLIENTS)
async def test_no_turn_of_a_client_drifts(server: Server, name: str) -> None:
    target = Target(server.url, f"client-{uuid4().hex}")
    await _CLIENTS[name](target)
    assert target.session is not None
    record = record_of(server.http, target.session, max(4, len(target.ids)))
    exact = record.check_exact()
    if target.ids and all(prompt for prompt, _ in target.ids):
        assert target.ids == exact
    follow_ups = [turn["reason"] for turn in record.turns[1:] if turn["source"] != "given"]
    # a call that was cut within its arguments comes back with its JSON completed
    assert set(follow_ups) <= {None, "call_repaired"}
    called = any(turn["message"].get("tool_calls") for turn in record.turns)
    assert called or name in _CALLS_NO_TOOLS


@only_in_front
@pytest.mark.parametrize("name", ["OpenAI SDK", "OpenAI Agents SDK", "LangGraph", "verifiers"])
async def test_how_far_the_same_drifts_on_a_stock_engine(
    server: Server, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """How far is printed, not judged; only the measurement itself is checked."""
    target = Target(server.engine.url, None)
    await _CLIENTS[name](target)
    assert len(target.ids) >= 4 and all(prompt and ids for prompt, ids in target.ids)
    with capsys.disabled():
        print(f"\n  {name}, stock vLLM: {target.drifted()} of {len(target.ids) - 1} follow-up turns drifted")


@only_inside
@pytest.mark.skipif(not RLLM.exists(), reason="scripts/install-programs rllm-model-gateway was not run")
async def test_a_session_of_rllm(server: Server) -> None:
    """rLLM's gateway client, unmodified: a session for an agent, and its turns for the trainer."""
    session = f"rllm-{uuid4().hex}"
    script = _SCRIPTS / "rllm_traces.py"
    url = await run_program(RLLM, script, server.url, session, "create")
    assert url == f"{server.url}/sessions/{session}/v1"
    target = Target(server.url, session)
    await hold_openai(target)
    traces = await run_program(RLLM, script, server.url, session, "traces")
    assert [(trace["prompt_token_ids"], trace["completion_token_ids"]) for trace in traces] == target.ids
    assert target.drifted() == 0
    assert all(len(trace["logprobs"]) == len(trace["completion_token_ids"]) for trace in traces)


@only_in_front
@pytest.mark.skipif(not TRL.exists(), reason="scripts/install-programs trl-1.10 was not run")
async def test_the_client_of_trl_1_10(server: Server, model: Path) -> None:
    """The last whose client calls the routes of `trl vllm-serve`."""
    results = await run_program(sys.executable, _SCRIPTS / "trl_1_10.py", TRL, server.url, model)
    for name in ("ids", "text", "second"):
        rows = zip(results[name]["completion_ids"], results[name]["logprob_token_ids"], strict=True)
        for sampled, ranked in rows:
            assert len(sampled) == len(ranked) > 0
            assert all(token in among for token, among in zip(sampled, ranked, strict=True))
    [digits] = results["regex"]["completion_ids"]
    answer = server.http.post("/detokenize", json={"tokens": [token for token in digits if token > 2]}).json()
    assert answer["prompt"].isdigit() and len(answer["prompt"]) == 3
    first, second = results["first"], results["second"]
    befores = zip(first["prompt_ids"], first["completion_ids"], strict=True)
    for (prompt, sampled), after in zip(befores, second["prompt_ids"], strict=True):
        assert after[: len(prompt) + len(sampled)] == prompt + sampled
