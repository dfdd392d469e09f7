"""Clients that nobody here wrote hold conversations, with only their base URL changed: no id drifts."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.acceptance.conftest import Server
from tests.campaign.real_vllm.clients import agents_sdk, langchain, sdks, trainers, verifiers_client
from tests.campaign.real_vllm.clients.target import Target
from tests.campaign.real_vllm.conftest import only_in_front, only_inside
from tests.support.recorded import record_of
from tokenproxy.demo.tools import TOOLS

_CACHE = Path(__file__).parents[3] / ".cache"
_NODE, _TRL = _CACHE / "openai-node", _CACHE / "trl-1.10"
_RLLM = _CACHE / "rllm-model-gateway" / "bin" / "python"
_FRAMEWORKS, _CREWAI = (_CACHE / name / "bin" / "python" for name in ("frameworks", "crewai"))
_AI_SDK = _CACHE / "ai-sdk"
_OPENENV, _HARBOR = _CACHE / "openenv" / "bin" / "python", _CACHE / "harbor"
_SCRIPTS = Path(__file__).parent / "clients"
_needs_node = pytest.mark.skipif(
    not ((_NODE / "node_modules").exists() and shutil.which("node")),
    reason="scripts/install-programs openai-node was not run",
)
_needs_ai_sdk = pytest.mark.skipif(
    not ((_AI_SDK / "node_modules").exists() and shutil.which("node")),
    reason="scripts/install-programs ai-sdk was not run",
)
_needs_crewai = pytest.mark.skipif(not _CREWAI.exists(), reason="scripts/install-programs crewai was not run")
_needs_frameworks = pytest.mark.skipif(
    not _FRAMEWORKS.exists(), reason="scripts/install-programs frameworks was not run"
)


async def _output(*command: object) -> Any:
    """The last line that a program prints, decoded as JSON. Fails with what it wrote to stderr."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return json.loads(output.splitlines()[-1])


async def _hold_node(target: Target, *flags: str) -> None:
    arguments = (_NODE, f"{target.root}/v1", target.session, json.dumps(list(TOOLS)))
    await _output("node", _SCRIPTS / "openai_node.mjs", *arguments, *flags)


_SAMPLED: dict[str, dict[str, Any]] = {
    "pydantic-ai": {"tool_choice": "required"},
    "inspect-ai": {"tool_choice": "required"},
    "CodeAgent": {"regex": r"Thought: [a-z ]{4,16}\n<code>\nprint\(weather\('(Paris|Rome)'\)\)\n</code>"},
    "mini-swe-agent": {"regex": r"THOUGHT: [a-z ]{4,16}\n\n```mswea_bash_command\nls [a-z]{2,8}\n```"},
}
"""What the sessions of frameworks set, so that the small model samples turns with which these go on."""


async def _hold_framework(target: Target, name: str) -> None:
    sampled = {"temperature": 1.2, "max_tokens": 128, **_SAMPLED[name]}
    if regex := sampled.pop("regex", None):
        sampled["structured_outputs"] = {"regex": regex}
    async with httpx.AsyncClient(base_url=target.url) as http:
        made = await http.post("/v1/sessions", json={"id": target.session, "overrides": sampled})
    assert made.status_code == 201, made.text
    await _output(_FRAMEWORKS, _SCRIPTS / "frameworks.py", name, f"{target.root}/v1")


_ECHOING = {
    "LangChain": None,
    "Agent Framework": None,
    "AG2": None,
    "semantic-kernel": "text_dropped",
    "CrewAI": "text_dropped",
    "agno": "call_ids_renamed",
    "AI SDK, compatible": "integers_rounded",
    "AI SDK, chat": "integers_rounded",
    "AI SDK, responses": "integers_rounded",
    "AI SDK, messages": "integers_rounded",
}
"""Clients that send turns back in a form of their own, and the reason under which these are recognised."""
_CALLED = (
    r'I look( at it)?\.\n<tool_call>\n\{"name": "%s", '
    r'"arguments": \{"city": "(Paris|Rome)", "number": 12345678901234567[0-9]{2}\}\}\n</tool_call>'
)


def _sampled_as(regex: str) -> str:
    """The overrides of a session whose turns match, as JSON.

    Where a tool is strict, as CrewAI's are, vLLM also allows a call alone, which begins with token 44, `<`.
    """
    outputs = {"structured_outputs": {"regex": regex}, "logit_bias": {"44": -100}}
    return json.dumps({"temperature": 1.2, "max_tokens": 128, **outputs})


async def _hold_echoing(target: Target, name: str) -> None:
    function = "Weather-weather" if name == "semantic-kernel" else "weather"
    said = (f"{target.root}/v1", _sampled_as(_CALLED % function), _sampled_as("It is [a-z ]{3,12}"))
    if name.startswith("AI SDK"):
        await _output("node", _SCRIPTS / "ai_sdk.mjs", _AI_SDK, name.removeprefix("AI SDK, "), *said)
    else:
        python = _CREWAI if name == "CrewAI" else _FRAMEWORKS
        await _output(python, "-P", _SCRIPTS / "echoing.py", name, *said)


_CLIENTS: dict[str, Callable[[Target], Awaitable[None]]] = {
    "OpenAI SDK": sdks.hold_openai,
    "Responses": partial(sdks.hold_responses, stores=False),
    "Responses, stored": partial(sdks.hold_responses, stores=True),
    "Anthropic SDK": sdks.hold_anthropic,
    "OpenAI Agents SDK": agents_sdk.hold,
    "LangChain, calls that are cut": langchain.hold_cut,
    "LangGraph": langchain.hold_react,
    "LangGraph, named": partial(langchain.hold_react, name="forecaster"),
    "verifiers": verifiers_client.hold,
    "NeMo-Gym": partial(trainers.hold_nemo_gym, ids=False),
    "NeMo-Gym, ids in both places": partial(trainers.hold_nemo_gym, ids=True),
    "TRL": trainers.hold_trl,
    "Node": _hold_node,
    "Node, streamed": lambda target: _hold_node(target, "stream"),
    **{name: partial(_hold_framework, name=name) for name in _SAMPLED},
    **{name: partial(_hold_echoing, name=name) for name in _ECHOING},
}
_MARKS = {
    **dict.fromkeys((*_SAMPLED, *_ECHOING), _needs_frameworks),
    **dict.fromkeys((name for name in _ECHOING if name.startswith("AI SDK")), _needs_ai_sdk),
    **{"Node": _needs_node, "Node, streamed": _needs_node, "CrewAI": _needs_crewai},
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=_MARKS.get(name, ())) for name in _CLIENTS],
)
async def test_no_turn_of_a_client_drifts(
    server: Server, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = Target(server.url, f"client-{uuid4().hex}")
    await _CLIENTS[name](target)
    assert target.session is not None
    record = record_of(server.http, target.session, max(4, len(target.ids)))
    exact = record.check_exact()
    if target.ids and all(prompt for prompt, _ in target.ids):
        assert target.ids == exact
    follow_ups = [turn["reason"] for turn in record.turns[1:] if turn["source"] != "given"]
    with capsys.disabled():
        print(f"\n  {name}: {len(record.turns) - 1} follow-up turns, all exact: {dict(Counter(follow_ups))}")
    # a call that was cut within its arguments comes back with its JSON completed
    assert set(follow_ups) <= {None, "call_repaired", "text_stripped", _ECHOING.get(name)}
    assert name not in _ECHOING or _ECHOING[name] in follow_ups
    # TRL's client sends ids, and calls no tools; two of the frameworks have theirs in the text
    without_calls = name == "TRL" or "regex" in _SAMPLED.get(name, {})
    assert without_calls or any(turn["message"].get("tool_calls") for turn in record.turns)


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
@pytest.mark.skipif(not _RLLM.exists(), reason="scripts/install-programs rllm-model-gateway was not run")
async def test_a_session_of_rllm(server: Server) -> None:
    """rLLM's gateway client, unmodified: a session for an agent, and its turns for the trainer."""
    session = f"rllm-{uuid4().hex}"
    client = (_RLLM, _SCRIPTS / "rllm_traces.py", server.url, session)
    assert await _output(*client, "create") == f"{server.url}/sessions/{session}/v1"
    target = Target(server.url, session)
    await sdks.hold_openai(target)
    traces = await _output(*client, "traces")
    assert [(trace["prompt_token_ids"], trace["completion_token_ids"]) for trace in traces] == target.ids
    assert target.drifted() == 0
    assert all(len(trace["logprobs"]) == len(trace["completion_token_ids"]) for trace in traces)


async def _rewarded_session(server: Server) -> Target:
    target = Target(server.url, f"export-{uuid4().hex}")
    await sdks.hold_openai(target)
    rewarded = server.http.post(f"/v1/sessions/{target.session}/reward", json={"reward": 0.5})
    assert rewarded.status_code == 200, rewarded.text
    return target


@only_in_front
@pytest.mark.skipif(not _OPENENV.exists(), reason="scripts/install-programs openenv was not run")
async def test_openenv_reads_the_program_of_its_page(server: Server) -> None:
    """OpenEnv's own model accepts the trace, and its entries have the ids that the engine returned."""
    target = await _rewarded_session(server)
    page = (Path(__file__).parents[3] / "docs" / "trainers" / "openenv.md").read_text()
    [program] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    program = program.replace("http://127.0.0.1:8100", server.url)
    program += f"""
import json
entries = fetch_training_trace({target.session!r}).to_trace_entries()
assert TrainingTrace.from_entries(entries).to_trace_entries() == entries
print(json.dumps(entries))
"""
    entries = await _output(_OPENENV, "-c", program)
    assert [(each["prompt_token_ids"], each["completion_token_ids"]) for each in entries] == target.ids
    for each in entries:
        assert each["loss_mask"] == [0] * len(each["prompt_token_ids"]) + [1] * len(each["per_token_logps"])
        assert each["response"]["choices"][0]["message"]["role"] == "assistant"
        assert each["metadata"]["reward"] == 0.5
        assert each["request"]["messages"][-1]["role"] in ("user", "tool")


@only_in_front
@pytest.mark.skipif(not _HARBOR.exists(), reason="scripts/install-programs harbor was not run")
def test_harbor_validates_a_trajectory(server: Server, tmp_path: Path) -> None:
    target = asyncio.run(_rewarded_session(server))
    answer = server.http.get(f"/v1/sessions/{target.session}/samples", params={"layout": "atif"}).json()
    [row] = answer["samples"]
    file = tmp_path / "trajectory.json"
    file.write_text(json.dumps(row))
    validated = subprocess.run(
        [sys.executable, "-m", "harbor.utils.trajectory_validator", file],
        env={**os.environ, "PYTHONPATH": str(_HARBOR)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert validated.returncode == 0, validated.stderr
    metrics = [step["metrics"] for step in row["steps"] if step["source"] == "agent"]
    assert [(each["prompt_token_ids"], each["completion_token_ids"]) for each in metrics] == target.ids
    assert any(step.get("observation") for step in row["steps"])


@only_in_front
@pytest.mark.skipif(not _TRL.exists(), reason="scripts/install-programs trl-1.10 was not run")
async def test_the_client_of_trl_1_10(server: Server, model: Path) -> None:
    """The last whose client calls the routes of `trl vllm-serve`."""
    results = await _output(sys.executable, _SCRIPTS / "trl_1_10.py", _TRL, server.url, model)
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
