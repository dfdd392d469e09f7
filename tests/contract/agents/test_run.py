"""`tokenproxy run` and `tokenproxy env` against a real proxy."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.fake_vllm import FakeVllm
from tests.support.ports import held_port
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_app, run_proxy
from tokenproxy.cli.key import add_key
from tokenproxy.cli.main import main
from tokenproxy.settings import Settings

Capture = pytest.CaptureFixture[str]
_AGENT = """
import json, os, sys, urllib.request
base, model = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_MODEL"]
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
messages = []
for text in sys.argv[2:]:
    messages.append({"role": "user", "content": text})
    body = json.dumps({"model": model, "messages": messages}).encode()
    request = urllib.request.Request(base + "/chat/completions", body, headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
        messages.append(json.load(answer)["choices"][0]["message"])
sys.exit(int(sys.argv[1]))
"""

_HOLDER = """
import httpx, os
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions/tokens"
new = [{"role": "user", "content": "Hi, says a holder"}]
first = httpx.post(url, json={"messages": new}).raise_for_status().json()
ids = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
httpx.post(url, json={"prompt_ids": ids, "append_messages": new}).raise_for_status()
"""


@pytest.fixture(scope="module")
def served(tiny_model: TinyModel) -> Iterator[tuple[FakeVllm, httpx.Client]]:
    with FakeVllm(tiny_model) as fake, run_proxy([fake], store="memory:") as client:
        yield fake, client


@pytest.fixture
def proxy(
    served: tuple[FakeVllm, httpx.Client], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[httpx.Client]:
    """A client of the proxy that the commands find."""
    monkeypatch.setenv("TOKENPROXY_URL", f"{str(served[1].base_url).rstrip('/')}/v1")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield served[1]
    served[0].reset()


@pytest.fixture(scope="module")
def urls(served: tuple[FakeVllm, httpx.Client]) -> Iterator[dict[str, str]]:
    """Servers at which nothing can be run, by name."""
    with held_port() as port:
        nothing = f"http://127.0.0.1:{port}"
        with run_app(Settings(upstreams=[nothing], store="memory:")) as no_engine:
            engine = served[0].url
            https = engine.replace("http:", "https:")
            yield {
                "NOTHING": nothing,
                "ENGINE": engine,
                "HTTPS": https,
                "NO_ENGINE": str(no_engine.base_url),
            }


def _agent(code: int, *texts: str) -> list[str]:
    return [sys.executable, "-c", _AGENT, str(code), *texts]


def _session(printed: str) -> str:
    found = re.search(r"session (\S+) of", printed)
    assert found
    return found[1]


def _rows(printed: str) -> dict[str, str]:
    """The value and words of each row of the table."""
    rows = re.findall(r"(?m)^ +(\w+) +(\S+)  ?(.*)$", printed)
    return {name: f"{value} {words}" for name, value, words in rows}


def test_a_command_is_recorded_in_a_session_of_its_own(proxy: httpx.Client, capfd: Capture) -> None:
    assert main(["run", "--", *_agent(3, "Hi", "More", "Still more")]) == 3
    printed = capfd.readouterr()
    assert printed.out == ""
    rows = _rows(printed.err)
    assert re.match(r"3 \d+ ids sampled", rows["turns"])
    assert rows["exact"] == "2 of 2 that continue a conversation"
    assert rows["roots"] == "1 conversations; 0 forks"
    assert re.match(r"1 \d+ ids to train on", rows["samples"])
    session = proxy.get(f"/v1/sessions/{_session(printed.err)}").json()
    assert (session["explicit"], session["turn_count"], session["reward"]) == (True, 3, None)


@pytest.mark.parametrize("code, reward", [(0, 1.0), (1, 0.0)])
def test_the_exit_code_may_be_the_reward(
    proxy: httpx.Client, capfd: Capture, code: int, reward: float
) -> None:
    assert main(["run", "--reward-from-exit-code", "--metadata", "task=7", "--", *_agent(code, "Hi")]) == code
    printed = capfd.readouterr().err
    session = proxy.get(f"/v1/sessions/{_session(printed)}").json()
    assert (session["reward"], session["metadata"]) == (reward, {"task": "7"})
    assert _rows(printed)["reward"].startswith(f"{reward:g} ")


def test_a_session_goes_on(
    proxy: httpx.Client, capfd: Capture, served: tuple[FakeVllm, httpx.Client]
) -> None:
    command = ["run", "--session", "task-7", "--max-tokens", "5", "--temperature", "0.5", "--"]
    assert main([*command, *_agent(0, "Hi")]) == 0
    capfd.readouterr()
    assert main([*command, *_agent(0, "Ho", "He")]) == 0
    assert "2 turns are new" in _rows(capfd.readouterr().err)["turns"]
    assert proxy.get("/v1/sessions/task-7").json()["turn_count"] == 3
    sent = served[0].last().json
    assert (sent["max_tokens"], sent["temperature"]) == (5, 0.5)


def test_refusals_are_told_in_place_of_nothing(proxy: httpx.Client, capfd: Capture) -> None:
    """Those of this command alone, with their reason."""
    too_long = _agent(0, "Hi " * 9000)
    for count, command in ((1, too_long), (2, ["sh", "-c", '"$@"; "$@"', "sh", *too_long])):
        assert main(["run", "--session", "refused", "--", *command]) == 1
        printed = capfd.readouterr().err
        told = rf"{count} requests refused, the last one: 400 This model's maximum context length is 4096 "
        assert re.search(told, printed) and "nothing was recorded" not in printed
    assert main(["run", "--session", "refused", "--", *_agent(0, "Hi")]) == 0
    assert "requests refused" not in capfd.readouterr().err


def test_stdin_and_stdout_are_the_commands_own(proxy: httpx.Client) -> None:
    command = [sys.executable, "-m", "tokenproxy", "run", "--", "cat"]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, input=b"through", capture_output=True, timeout=60, cwd=root)
    assert (done.returncode, done.stdout) == (0, b"through")
    assert b"nothing was recorded" in done.stderr


def test_a_script_gets_everything_and_a_program_its_own(
    proxy: httpx.Client, capfd: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "the user's own")
    monkeypatch.setenv("OPENAI_API_KEY", "of a judge")
    script = tmp_path / "claude"
    script.write_text("#!/bin/sh\nenv\n")
    script.chmod(0o755)

    def seen(*arguments: str) -> dict[str, str]:
        assert main(["run", *arguments]) == 0
        lines = capfd.readouterr().out.splitlines()
        return dict(line.partition("=")[::2] for line in lines)

    own = seen("--", str(script))
    assert own["ANTHROPIC_MODEL"] == "tiny"
    assert (own["OPENAI_API_KEY"], own.get("ANTHROPIC_API_KEY")) == ("of a judge", None)
    every = seen("--", "env")
    assert {"ANTHROPIC_BASE_URL", "CODEX_HOME", "OPENCODE_CONFIG_CONTENT", "OPENAI_BASE_URL"} <= every.keys()
    some = seen("--for", "openai", "--model", "adapter", "--", "env")
    assert (some["OPENAI_MODEL"], some["ANTHROPIC_API_KEY"]) == ("adapter", "the user's own")


@pytest.mark.parametrize("program", ["claude", "codex", "opencode", "openai"])
def test_env_is_sourced(proxy: httpx.Client, capsys: Capture, program: str) -> None:
    assert main(["env", program, "--session", "s-1", "--api-key", "it's"]) == 0
    printed = capsys.readouterr().out
    assert all(re.match(r"(export \w+=|unset \w+$)", line) for line in printed.splitlines())
    command = ["sh", "-c", 'eval "$1"; env', "sh", printed]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
    assert done.returncode == 0, done.stderr
    assert "s-1" in done.stdout and "it's" in done.stdout


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("run --", r"no command: pass one after --"),
        ("run --model other -- true", r"'other' is not served: pass --model with one of .*tiny"),
        ("run --session a,b -- true", r"refused: `id` must be"),
        ("run --metadata task -- true", r"--metadata must be KEY=VALUE"),
        ("run --url NOTHING -- true", r"no proxy at http://127.0.0.1:\d+: start one"),
        ("run --url HTTPS -- true", r"no proxy at https://127.*SSL"),
        ("run --url ENGINE -- true", r"is no tokenproxy: pass --url URL"),
        ("run --url NO_ENGINE -- true", r"refused"),
        ("env claude --max-tokens 5", r"add --session NAME"),
    ],
)
def test_errors_say_what_to_do(
    proxy: httpx.Client, urls: dict[str, str], capsys: Capture, arguments: str, words: str
) -> None:
    assert main([urls.get(word, word) for word in arguments.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    [line] = printed.err.splitlines()
    assert re.match(f"tokenproxy: .*{words}", line)


def test_commands_that_cannot_be_run(proxy: httpx.Client, capfd: Capture) -> None:
    for command, code in (("no-such-command", 127), ("/tmp", 126)):
        assert main(["run", "--", command]) == code
        _, told = capfd.readouterr().err.splitlines()  # nothing ran, so nothing else is told
        assert told.startswith(f"tokenproxy: {command}: ")


def test_what_a_program_that_recorded_nothing_should_read(
    proxy: httpx.Client, capfd: Capture, tmp_path: Path
) -> None:
    claude = tmp_path / "claude"
    claude.symlink_to("/bin/true")
    for arguments, programs in (
        ([str(claude)], "claude"),
        (["true"], "claude|codex|opencode|openai"),
    ):
        assert main(["run", "--", *arguments]) == 0
        assert f"`tokenproxy env {programs}` shows what it should read" in capfd.readouterr().err


def test_a_program_that_holds_the_ids(proxy: httpx.Client, capfd: Capture) -> None:
    """Its first turn begins the conversation: it is no turn that was rendered in place of an extension."""
    assert main(["run", "--", sys.executable, "-c", _HOLDER]) == 0
    rows = _rows(capfd.readouterr().err)
    assert (rows["exact"], rows["roots"]) == (
        "1 of 1 that continue a conversation",
        "1 conversations; 0 forks",
    )
    assert "rendered" not in rows


def test_keys(
    served: tuple[FakeVllm, httpx.Client], capfd: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.yaml"
    inference = add_key(keys, "agent", ["inference"], None)
    with run_proxy([served[0]], api_key=["ALICE"], api_key_file=keys, store="memory:") as client:
        monkeypatch.setenv("TOKENPROXY_URL", str(client.base_url))
        assert main(["run", "--", "true"]) == 2
        assert "requires a key: pass --api-key KEY" in capfd.readouterr().err
        monkeypatch.setenv("TOKENPROXY_API_KEY", "ALICE,BOB")
        assert main(["run", "--", *_agent(0, "Hi")]) == 0
        printed = capfd.readouterr().err
        assert _rows(printed)["turns"].startswith("1 ") and "ALICE" not in printed
        monkeypatch.setenv("TOKENPROXY_ADMIN_KEY", "CAROL")
        monkeypatch.setenv("OTHER_KEY", "ALICE")
        assert main(["run", "--", sys.executable, "-c", "import os; print(dict(os.environ))"]) == 0
        environment = capfd.readouterr().out
        assert "tps-" in environment
        assert "ALICE" not in environment and "CAROL" not in environment
        assert main(["run", "--api-key", inference, "--", *_agent(5, "Hi")]) == 5
        assert "which this key may not read" in capfd.readouterr().err
