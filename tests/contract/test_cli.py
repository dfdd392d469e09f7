"""The command line: help, flags, errors of one line, and the command as it is installed."""

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest
from pydantic import SecretStr

from tests.support.child_environment import python_path_without_torch
from tests.support.fake_vllm import FakeVllm
from tests.support.tiny_model import CHATML
from tokenproxy.cli.main import main
from tokenproxy.settings import Settings

Capture = pytest.CaptureFixture[str]
_NO_CERTIFICATE = ("--tls-cert", __file__, "--tls-key", __file__)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings with which the server would have run."""
    settings: list[Settings] = []

    def run(given: Settings) -> int:
        settings.append(given)
        return 0

    monkeypatch.setattr("tokenproxy.app.server.run", run)
    return settings


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--help"], ["vllm", "serve", "demo", "never re-tokenise"]),
        (["--version"], [f"tokenproxy {version('tokenproxy')}"]),
        (["serve", "--help"], ["--upstream URL", "--config FILE", "TOKENPROXY_", "pass through"]),
        (["demo", "--help"], ["--serve", "--port", "--log FILE", "Exit code 1"]),
        (["vllm", "--help"], ["tokenproxy vllm MODEL", "vllm serve", "--api-server-count"]),
        (["run", "--help"], ["tokenproxy run -- claude", "--reward-from-exit-code"]),
    ],
)
def test_help(arguments: list[str], expected: list[str], capsys: Capture) -> None:
    try:
        code: object = main(arguments)
    except SystemExit as exited:
        code = exited.code
    text = capsys.readouterr().out
    assert code == 0
    assert [words for words in expected if words not in text] == []


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["serve"], "no upstream configured: pass --upstream URL"),
        (["serve", "--config", "missing.yaml"], "no settings file at missing.yaml"),
        (["serve", "--upstream", "localhost:8000"], "upstreams.*not an http"),
        (["serve", "--upstream", "http://a:1", "--chat-template", "missing.jinja"], "missing.jinja"),
        (["serve", "--upstreams", "http://a:1"], "--upstreams: .*did you mean --upstream?"),
        (["serve", "--prot=1"], "--prot=1: there is no such flag; did you mean --port?"),
        (["view", "s", "--ulr", "http://a:1"], "did you mean --url?"),
        (
            ["serve", "--upstream", "http://localhost:8100"],
            "http://localhost:8100 is the proxy's own address",
        ),
        (["serve", "--upstream", "http://a:1", "--tokenizer", "./nope"], "tokenizer: .*nothing at ./nope"),
        (["serve", "--upstream", "http://a:1", *_NO_CERTIFICATE], "tls_cert: .*no PEM certificate"),
        (["check", "org/model/nope"], "nothing at org/model/nope: name a folder"),
        (["check", "nope.jinja"], "nothing at nope.jinja"),
        (["serve", "--log-level", "loud"], "--log-level: invalid choice: 'loud'.*`tokenproxy serve --help`"),
        (["srve"], "invalid choice: 'srve'.*'serve'"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], words: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uvicorn.Server.run", lambda server: pytest.fail("it began to serve"))
    assert main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert re.search(f"^tokenproxy: .*{words}", line)


@pytest.mark.parametrize(
    "flags, name, value",
    [
        (["--drain-s", "2.5"], "drain_s", 2.5),
        (["--api-key", "k1", "--api-key", "k,2"], "api_key", [SecretStr("k1"), SecretStr("k,2")]),
        (["--chat-template", __file__], "chat_template", Path(__file__)),
        (["--store-required"], "store_required", True),
        (["--model-alias", "haiku=a", "--model-alias", "*=b"], "model_aliases", ["haiku=a", "*=b"]),
    ],
)
def test_flags_of_every_kind_arrive(
    served: list[Settings], flags: list[str], name: str, value: object
) -> None:
    """Flags are derived from the fields of the settings; `tests/unit/test_settings.py` looks at each."""
    assert main(["serve", "--upstream", "http://a:1", *flags]) == 0
    [settings] = served
    assert getattr(settings, name) == value


@pytest.mark.parametrize(
    ("flags", "warned"),
    [([], False), (["--host", "0.0.0.0"], True), (["--host", "0.0.0.0", "--api-key", "k"], False)],
)
def test_a_proxy_without_keys_beyond_loopback_warns(
    flags: list[str], warned: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uvicorn.Server.run", lambda server, sockets: None)
    monkeypatch.setattr("tokenproxy.app.server.configure_logs", lambda level, form: None)
    assert main(["serve", "--upstream", "http://a:1", "--port", "0", "--store", "memory:", *flags]) == 1
    assert ["--api-key KEY" in message for message in caplog.messages if "no keys" in message] == [
        True
    ] * warned


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "127.0.0.1.example.com", ""])
def test_the_engines_key_is_not_lent_to_the_public(
    served: list[Settings], host: str, capsys: Capture
) -> None:
    public, key = ["serve", "--upstream", "http://a:1", "--host", host], ["--upstream-api-key", "k"]
    assert main([*public, *key]) == 2
    assert "--api-key KEY" in capsys.readouterr().err
    public[2] = "http://user:hidden@a:1"
    assert main(public) == 2
    refusal = capsys.readouterr().err
    assert "the user in an upstream's URL" in refusal and "hidden" not in refusal
    assert not served
    public[2] = "http://a:1"
    assert main(public) == 0  # no key to lend
    for flags in (["--api-key", "a"], ["--admin-key", "a"]):
        assert main([*public, *key, *flags]) == 0
    for loopback in ("127.8.0.1", "::1", "LOCALHOST"):
        assert main([*public, *key, "--host", loopback]) == 0


def test_error_without_vllm_names_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setenv("VLLM_PLUGINS", "")
    assert main(["vllm", "some-model"]) == 2
    assert "pip install 'tokenproxy[vllm]'" in capsys.readouterr().err


def test_the_command_is_installed() -> None:
    [script] = entry_points(group="console_scripts", name="tokenproxy")
    assert script.load() is main


def test_files_of_the_working_directory_do_not_replace_the_package(tmp_path: Path) -> None:
    for name in ("proxy", "tokenization"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported by mistake')\n")
    command = [sys.executable, "-m", "tokenproxy", "--version"]
    environment = {**os.environ, "PYTHONPATH": python_path_without_torch()}
    assert subprocess.check_output(command, cwd=tmp_path, env=environment, text=True).startswith(
        "tokenproxy "
    )


def test_check_of_a_running_server_tells_who_renders(mortal: FakeVllm, capsys: Capture) -> None:
    command = ["check", "--upstream", mortal.url]
    assert main(command) == 0
    assert re.search(r"^template +/", capsys.readouterr().out, re.MULTILINE)
    mortal.chat_template = CHATML.replace(
        "'<|im_start|>' + message.role", "'<|im_start|>' + message.role | upper"
    )
    assert main(command) == 0
    report = capsys.readouterr().out
    assert re.search(r"^engine +/", report, re.MULTILINE) and "USER" in report
    assert main(["check", "--upstream", "http://127.0.0.1:1"]) == 2
    assert main(["check"]) == 2
    assert "--upstream URL" in capsys.readouterr().err
