"""The programs of docs/trainers/verl.md in a Ray cluster, with verl's own workers: two runs on one store."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.acceptance.conftest import Server
from tests.campaign.ray.cluster import Cluster, run_cluster
from tests.support.serve_process import ServeProcess
from tests.support.utils import wait_until

pytest.importorskip("ray", reason="scripts/install-programs ray installs it")
pytestmark = pytest.mark.timeout(900)

_ROOT = Path(__file__).parents[3]
_VERL = _ROOT / ".cache" / "verl"
_PAGE = (_ROOT / "docs" / "trainers" / "verl.md").read_text()
_AGENT = '''

async def run_agent(messages, base_url, api_key):
    """Two turns; the reward is the number in the prompt."""
    from openai import AsyncOpenAI

    messages = list(messages)
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(2):
            answer = await client.chat.completions.create(model="smollm2", messages=messages, max_tokens=8)
            messages += [answer.choices[0].message, {"role": "user", "content": "And another one?"}]
    return float(messages[0]["content"].split()[-1])
'''


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="verl-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.skipif(not _VERL.exists(), reason="scripts/install-programs verl was not run")
@pytest.mark.parametrize("way", ["Ray Serve", "POST /admin/replicas"])
def test_two_runs_of_verl_share_no_session(
    way: str, servers: Mapping[str, Server], model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy starts before verl, and finds its servers while it runs."""
    check(way, servers["in front"].engine.url, model, folder, monkeypatch)


def check(way: str, engine: str, model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(folder), str(_VERL), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    store = f"sqlite://{folder}/{way.split()[0]}.db"
    (folder / "ray").mkdir(exist_ok=True)
    with run_cluster(folder / "ray") as cluster:
        if way == "Ray Serve":
            [upstream] = re.findall(r"upstreams=(\S+)", _PAGE)
            settings = {"upstreams": [upstream], "store": store, "watch_interval_s": 0.5, "cpus": 0.1}
            cluster.run({"args": settings})
            _play(cluster, cluster.url, engine, model, folder)
            return
        [upstream] = re.findall(r"--upstream (\S+)", _PAGE)
        with ServeProcess([upstream], folder / "log", "--store", store) as proxy:
            _play(cluster, proxy.url, engine, model, folder, adds=True)


def _play(cluster: Cluster, url: str, engine: str, model: Path, folder: Path, *, adds: bool = False) -> None:
    program, adding = re.findall(r"```python\n(.*?)```", _PAGE, re.DOTALL)
    [loops] = re.findall(r"```yaml\n(.*?)```", _PAGE, re.DOTALL)
    (folder / "tokenproxy_loop.py").write_text(program.replace("http://127.0.0.1:8100", url) + _AGENT)
    (folder / "agent_loops.yaml").write_text(loops)
    address = engine.removeprefix("http://")
    script = Path(__file__).parent / "verl_page.py"
    command = [*map(str, (sys.executable, script, model, folder / "agent_loops.yaml", address))]
    environment = os.environ | {"RAY_ADDRESS": f"127.0.0.1:{cluster.port}", "HF_HUB_OFFLINE": "1"}
    with (
        (folder / "verl.log").open("w") as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, text=True
        ) as verl,
    ):
        if adds:
            wait_until(lambda: _adds(cluster, adding.replace("http://127.0.0.1:8100", url)), 120)
        wait_until(lambda: httpx.get(f"{url}/ready", timeout=30).json()["ready"], 240)
        output, _ = verl.communicate("\n", timeout=600)
    assert verl.returncode == 0, (folder / "verl.log").read_text()[-5000:]
    runs: list[list[dict[str, Any]]] = json.loads(output.splitlines()[-1])
    _check(runs, url)


def _adds(cluster: Cluster, program: str) -> bool:
    """The program that adds verl's servers; whether it found one."""
    printed = cluster.command("python", "-c", program.rstrip() + "\n        print('added')")
    return "added" in printed


def _check(runs: list[list[dict[str, Any]]], url: str) -> None:
    names = [row["rollout"] for run in runs for row in run]
    assert len({*names}) == len(names) == 4
    for run in runs:
        for number, row in enumerate(run):
            session = httpx.get(f"{url}/v1/sessions/{row['rollout']}?ids=true", timeout=60).json()
            assert session["metadata"] == {"run": "colours", "step": 4, "split": "train"}
            assert (row["turns_after_finish"], sum(row["rm_scores"])) == (0, float(number))
            sampled = [token for turn in session["turns"] for token in turn["completion_ids"]]
            pairs = zip(row["responses"], row["response_mask"], strict=True)
            assert len(session["turns"]) == 2 and [token for token, mask in pairs if mask] == sampled
