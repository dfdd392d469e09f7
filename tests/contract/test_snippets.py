"""The code of all pages, run as it is written at a proxy that stands where the pages say."""

import re
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import httpx
import pytest

from tests.support.fake_trained import FakeTrained, Rendezvous
from tests.support.snippets import NOT_HERE, OUR_ADDRESS, Snippet, blocks, commands, programs
from tests.support.talk import CHAT, user
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_proxy
from tokenproxy.cli import main as cli
from tokenproxy.cli.flags import COMMANDS

_CURL = [each for each in commands() if "curl " in each.code and OUR_ADDRESS.search(each.code)]
_OURS = [each for each in commands() if each.arguments]
_SHELL = 'set -eo pipefail; curl() { command curl -sS --fail-with-body "$@"; }; '


@pytest.fixture(scope="module")
def proxy(tiny_model: TinyModel) -> Iterator[httpx.Client]:
    """A proxy with the model and the sessions that the pages name; one of them is finished."""
    with FakeTrained(tiny_model, Rendezvous(1)) as engine:
        engine.names = ["smollm2"]
        with run_proxy([engine], store="memory:") as client:
            for session in ("run-7", "task-1"):
                headers = {"X-Session-ID": session}
                client.post(CHAT, json={"messages": [user("Hi")]}, headers=headers).raise_for_status()
            client.post("/v1/sessions/run-7/reward", json={"reward": 1.0}).raise_for_status()
            client.headers["engine"] = engine.url
            yield client


@pytest.mark.parametrize("snippet", programs(), ids=lambda each: each.name)
def test_programs_run(proxy: httpx.Client, snippet: Snippet) -> None:
    # the engine's vocabulary is smaller than that of the pages' model
    code = re.sub(r"(?<=[\[ ])\d{3,5}(?=[,\]])", lambda token: token[0][:2], snippet.at(str(proxy.base_url)))
    exec(compile(code, snippet.page, "exec"), {"__name__": "snippet"})


@pytest.mark.parametrize("snippet", _CURL, ids=lambda each: each.name)
def test_requests_are_served(proxy: httpx.Client, snippet: Snippet) -> None:
    code = snippet.at(str(proxy.base_url)).replace("http://gpu-2:8000", proxy.headers["engine"])
    if "/ack" in code:  # the page's cursor is one of another time
        cursor = proxy.get("/v1/samples", params={"consumer": "trainer"}).json()["cursor"]
        code = re.sub(r'(?<="cursor":")\d+', cursor, code)
    done = subprocess.run(["bash", "-c", _SHELL + code], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("snippet", _OURS, ids=lambda each: each.name)
def test_flags_of_the_command_exist(snippet: Snippet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags and values are read as the command reads them; what it would do is not done."""
    ran: list[object] = []
    command = SimpleNamespace(**{known.run.partition(":")[2]: ran.append for known in COMMANDS.values()})
    monkeypatch.setattr(cli, "import_module", lambda name: command)
    monkeypatch.setattr(cli, "_vllm", ran.append)
    cli.main(snippet.arguments)
    assert len(ran) == 1


def test_clients_of_the_pages_speak_to_the_port_of_the_proxy() -> None:
    """Port 8000 is that of an engine: only a proxy is told of it."""
    addresses = r"(.*)(?:127\.0\.0\.1|localhost):8000"
    others = [
        (block.page, line)
        for block in blocks()
        for line in block.code.splitlines()
        for before in re.findall(addresses, line)
        if "--upstream " not in before
    ]
    assert others == []


def test_what_does_not_run_is_on_its_page() -> None:
    text = {page: "".join(block.code for block in blocks() if block.page == page) for page in NOT_HERE}
    assert [(page, words) for page in NOT_HERE for words in NOT_HERE[page] if words not in text[page]] == []
    assert len(programs()) >= 12 and len(_CURL) >= 10 and len(_OURS) >= 25
