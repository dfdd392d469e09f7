"""`tokenproxy run`, classes of turns and model aliases on a real vLLM."""

import re
import secrets
import subprocess
import sys
from pathlib import Path

from openai import OpenAI

from proxy.client import Client
from proxy.demo.stack import MODEL_NAME, EngineProcess
from tests.campaign.real_vllm.conftest import Served, run_proxy

_AGENT = """
import sys
from openai import OpenAI
import os
client, messages = OpenAI(max_retries=0, timeout=120), []
def ask(messages, **headers):
    answer = client.chat.completions.create(
        model=os.environ["OPENAI_MODEL"], messages=messages, extra_headers=headers
    )
    return answer.choices[0].message.to_dict()
for text in ("Name a colour.", "Another one?", "And a third?"):
    messages.append({"role": "user", "content": text})
    messages.append(ask(messages, **{"x-claude-code-request-class": "main"}))
ask([{"role": "user", "content": "Title?"}], **{"x-claude-code-agent-id": "a1"})
sys.exit(3)
"""


def test_a_command_is_recorded_exactly(server: Served, tmp_path: Path) -> None:
    name = f"run-{secrets.token_hex(4)}"
    flags = ["--session", name, "--max-tokens", "16", "--temperature", "1.3", "--reward-from-exit-code"]
    command = [sys.executable, "-m", "proxy.cli", "run", "--url", server.url, *flags, "--"]
    done = subprocess.run(
        [*command, sys.executable, "-c", _AGENT], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 3, done.stderr
    assert re.search(r"exact +2  of 2 that continue a conversation", done.stderr), done.stderr
    assert re.search(r"agents +2  turns by class: main 3, subagent 1", done.stderr), done.stderr

    with Client(server.url) as client:
        session = client.session(name, ids=True)
        [sample] = client.samples(name, classes=["main"]).samples
    assert session.reward == 0.0
    assert [(agent["id"], agent["turns"]) for agent in session.agents] == [(None, 3), ("a1", 1)]
    turns = [turn for turn in session.turns if turn["request_class"] == "main"]
    assert all(turn["completion_tokens"] <= 16 for turn in turns)
    ids: list[int] = []
    for turn in turns:
        assert turn["reused"] == len(ids)  # the prompt begins with all ids before it
        ids += [*turn["appended_ids"], *turn["completion_ids"]]
    assert sample["prompt_ids"] + sample["completion_ids"] == ids


def test_names_that_nobody_serves(engines: dict[str, EngineProcess]) -> None:
    with run_proxy(engines["stock"].url, "--model-alias", f"*haiku*={MODEL_NAME}") as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        messages = [{"role": "user", "content": f"Name a colour {secrets.token_hex(4)}"}]
        sources = []
        for model in ("claude-haiku-9", "other-haiku", MODEL_NAME):
            raw = client.chat.completions.with_raw_response.create(
                model=model,
                messages=messages,  # type: ignore[arg-type]
                max_tokens=8,
            )
            answer = raw.parse()
            assert answer.model == MODEL_NAME
            sources.append(raw.headers["X-Prompt-Source"])
            messages += [answer.choices[0].message.to_dict(), {"role": "user", "content": "More"}]  # type: ignore[list-item]
        assert sources == ["rendered", "extended", "extended"]
