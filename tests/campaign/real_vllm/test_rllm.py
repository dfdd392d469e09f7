"""rLLM's gateway client, unmodified: a session for an agent, and its turns for the trainer."""

from itertools import pairwise
from pathlib import Path
from uuid import uuid4

import pytest

from tests.campaign.real_vllm.conftest import Served, only_inside
from tests.campaign.real_vllm.neighbours.programs import run_program
from tests.campaign.real_vllm.rollouts import TOOL_OPTIONS, Talk, open_client

PYTHON = Path(__file__).parents[3] / ".cache" / "rllm-model-gateway" / "bin" / "python"
SCRIPT = Path(__file__).parent / "neighbours" / "rllm_traces.py"

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="scripts/install-programs rllm-model-gateway was not run"
)


@only_inside
async def test_a_session_of_rllm(server: Served) -> None:
    session = f"rllm-{uuid4().hex}"
    url = await run_program(PYTHON, SCRIPT, server.url, session, "create")
    assert url == f"{server.url}/sessions/{session}/v1"
    async with open_client(url) as client:
        talk = Talk(client, options={"extra_body": {"return_token_ids": True}})
        await talk.say("How much is 18 * 7?", **TOOL_OPTIONS)
        talk.options["tools"] = TOOL_OPTIONS["tools"]
        await talk.say("And so?", tool_choice="none")
        await talk.say("Thank you!", tool_choice="none")
    traces = await run_program(PYTHON, SCRIPT, server.url, session, "traces")
    seen = [(turn.prompt_ids, turn.ids, turn.finish_reason) for turn in talk.turns]
    names = ("prompt_token_ids", "completion_token_ids", "finish_reason")
    assert [tuple(trace[name] for name in names) for trace in traces] == seen
    for before, after in pairwise(traces):
        ids = before["prompt_token_ids"] + before["completion_token_ids"]
        assert after["prompt_token_ids"][: len(ids)] == ids
        assert after["messages"][: len(before["messages"])] == before["messages"]
    assert all(len(trace["logprobs"]) == len(trace["completion_token_ids"]) > 0 for trace in traces)
