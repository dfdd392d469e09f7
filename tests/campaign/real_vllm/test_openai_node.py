"""The OpenAI SDK for Node, unmodified: a conversation with tool calls, whole and streamed."""

import json
import shutil
from pathlib import Path
from uuid import uuid4

import pytest

from proxy.demo.tools import TOOLS
from tests.campaign.real_vllm.conftest import Served, only_in_front
from tests.campaign.real_vllm.neighbours.programs import run_program
from tests.campaign.real_vllm.rollouts import check_samples, open_client, record_of

FOLDER = Path(__file__).parents[3] / ".cache" / "openai-node"
SCRIPT = Path(__file__).parent / "neighbours" / "openai_node.mjs"

pytestmark = pytest.mark.skipif(
    not (FOLDER / "node_modules").exists() or shutil.which("node") is None,
    reason="scripts/install-programs openai-node was not run, or there is no node",
)


@pytest.mark.broad
@only_in_front
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_conversation_with_tool_calls(server: Served, stream: bool) -> None:
    session = f"node-{uuid4().hex}"
    arguments = (
        FOLDER,
        f"{server.url}/v1",
        session,
        json.dumps(list(TOOLS)),
        *(["stream"] if stream else []),
    )
    reasons = await run_program("node", SCRIPT, *arguments)
    async with open_client(f"{server.url}/v1") as client:
        kept = await record_of(client, session)
    assert [turn["finish_reason"] for turn in kept.turns] == reasons
    assert [turn["source"] for turn in kept.turns] == ["rendered", "extended", "extended", "extended"]
    assert [turn["problem"] for turn in kept.turns] == [None] * 4
    for before, after in zip(kept.turns, kept.turns[1:], strict=False):
        assert after["parent"] == before["id"]
        ids = kept.prompt(before) + before["completion_ids"]
        assert kept.prompt(after)[: len(ids)] == ids
    check_samples(kept)
    assert len(kept.samples) == 1
