import os
import re
import signal
import subprocess
import sys
from importlib.metadata import entry_points, version
from pathlib import Path

import httpx
import pytest

from proxy.cli import main
from proxy.settings import Settings
from tests.support.fake_vllm import Canned, FakeVllm

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings with which the server would have run."""
    settings: list[Settings] = []

    def run(given: Settings) -> int:
        settings.append(given)
        return 0

    monkeypatch.setattr("proxy.server.run", run)
    return settings


def test_version(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["--version"])
    assert exited.value.code == 0
    assert capsys.readouterr().out == f"tokenproxy {version('tokenproxy')}\n"


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--help"], ["vllm", "serve", "demo", "never re-tokenise"]),
        (["serve", "--help"], ["--upstream URL", "--config FILE", "TOKENPROXY_", "pass through"]),
        (["demo", "--help"], ["--serve", "--port", "--log FILE", "Exit code 1"]),
        (["vllm", "--help"], ["tokenproxy vllm MODEL", "vllm serve", "--api-server-count"]),
        (["vllm", "-h"], ["tokenproxy vllm MODEL"]),
        (
            ["run", "--help"],
            ["tokenproxy run -- claude", "--reward-from-exit-code", "Exit code", "--session"],
        ),
        (["env", "--help"], ['eval "$(tokenproxy env claude)"', "--session NAME"]),
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


@pytest.mark.parametrize("arguments, words", [([], "COMMAND"), (["vllm"], "tokenproxy vllm MODEL")])
def test_missing_arguments_show_help(arguments: list[str], words: str, capsys: Capture) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["serve"], "no upstream configured: pass --upstream URL"),
        (["serve", "--config", "missing.yaml"], "no settings file at missing.yaml"),
        (["serve", "--upstream", "localhost:8000"], "upstreams.*not an http"),
        (["serve", "--upstream", "http://a:1", "--port", "70000"], "port: "),
        (["serve", "--upstream", "http://a:1", "--chat-template", "missing.jinja"], "missing.jinja"),
        (["serve", "--upstream", "http://a:1", "--api-key", ""], "api_key: .*must not be empty"),
        (
            ["serve", "--upstream", "http://a:1", "--upstream-api-key", "k", "--host", "0.0.0.0"],
            "0.0.0.0 .*--api-key KEY.*127.0.0.1.*--allow-anonymous",
        ),
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
    "arguments", [["nonsense"], ["serve", "--nonsense"], ["serve", "--token-in", "guess"]]
)
def test_unknown_commands_and_flags(arguments: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code == 2
    assert "usage: tokenproxy" in capsys.readouterr().err


_VALUES = {
    "--host": "0.0.0.0",
    "--port": "1",
    "--workers": "2",
    "--upstream-api-key": "b",
    "--tokenizer": "c",
    "--token-in": "chat",
    "--body-limit-bytes": "2",
    "--store": "sqlite:rollouts.db",
    "--store-max-bytes": "6",
    "--store-max-age-s": "7.5",
    "--finish-after-s": "8.5",
    "--cache-bytes": "8",
    "--connect-timeout-s": "3.5",
    "--store-timeout-s": "2.5",
    "--replica-requests": "11",
    "--replica-ids": "12",
    "--overload-ratio": "2.5",
    "--idle-timeout-s": "2.5",
    "--fleet-name": "trainers",
    "--watch-interval-s": "4.5",
    "--weight-update-timeout-s": "5.5",
    "--encoder-threads": "5",
    "--stop-delay-s": "1.5",
    "--drain-s": "2.5",
    "--audit-share": "0.5",
    "--queue-requests": "9",
    "--queue-timeout-s": "9.5",
    "--encoder-bytes": "10",
    "--overflow": "render",
    "--thinking-policy": "template",
    "--stored-response-bytes": "14",
    "--image-bytes": "12",
    "--image-pixels": "13",
    "--image-timeout-s": "14.5",
    "--log-level": "debug",
    "--http-parser": "h11",
    "--head-limit-bytes": "2048",
    "--head-timeout-s": "8.5",
    "--body-timeout-s": "9.5",
    "--connections-per-address": "10",
    "--log-format": "json",
    "--request-class-header": "x-class",
}
_LISTS = [
    "--upstream",
    "http://a:1",
    "--upstream",
    "http://b:2/v1",
    "--api-key",
    "k1",
    "--api-key",
    "k,2",
    *("--admin-key", "a1", "--admin-key", "a2"),
    *("--allowed-hosts", "a.example", "--allowed-hosts", "*.b.example"),
    *("--cors-origins", "https://a.example"),
    *("--image-hosts", "images.example"),
    *("--model-alias", "haiku=a", "--model-alias", "*=b"),
]
_SWITCHES = [
    "--store-required",
    "--trust-remote-code",
    "--no-record-logprobs",
    "--no-record-token-route",
    "--allow-anonymous",
    "--metrics-need-key",
    "--cache-salt-by-version",
    "--no-viewer",
    "--access-log",
    "--session-from-key",
]


def test_every_flag_arrives(served: list[Settings], tmp_path: Path) -> None:
    template, keys = tmp_path / "template.jinja", tmp_path / "keys.yaml"
    template.touch()
    upstreams = tmp_path / "engines.txt"
    upstreams.write_text("http://c:1")
    keys.write_text("[]")
    flags = {
        **_VALUES,
        "--chat-template": str(template),
        "--upstreams-file": str(upstreams),
        "--proof-folder": str(tmp_path),
        "--api-key-file": str(keys),
        "--tls-cert": str(template),
        "--tls-key": str(template),
    }
    pairs = [word for pair in flags.items() for word in pair]
    assert main(["serve", *_LISTS, *pairs, *_SWITCHES]) == 0
    [settings] = served
    assert settings.upstreams == ["http://a:1", "http://b:2"]
    assert [key.get_secret_value() for key in settings.api_key] == ["k1", "k,2"]
    assert [key.get_secret_value() for key in settings.admin_key] == ["a1", "a2"]
    assert settings.allowed_hosts == ["a.example", "*.b.example"]
    assert settings.cors_origins == ["https://a.example"]
    assert (settings.trust_remote_code, settings.allow_anonymous) == (True, True)
    assert settings.metrics_need_key
    assert settings.store_required
    assert (settings.record_logprobs, settings.record_token_route) == (False, False)
    assert settings.access_log and settings.session_from_key
    assert not settings.viewer
    assert settings.model_aliases == ["haiku=a", "*=b"]
    for flag, value in flags.items():
        name = flag[2:].replace("-", "_")
        found = getattr(settings, name)
        found = found.get_secret_value() if name == "upstream_api_key" else found
        assert str(found) == value
    assert settings.model_fields_set == set(Settings.model_fields)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost", "LOCALHOST"])
def test_the_engines_key_is_lent_on_loopback(served: list[Settings], host: str) -> None:
    assert main(["serve", "--upstream", "http://a:1", "--upstream-api-key", "k", "--host", host]) == 0


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.1", "proxy.example.com", "127.0.0.1.example.com", ""]
)
def test_the_engines_key_is_not_lent_to_the_public(
    served: list[Settings], host: str, capsys: Capture
) -> None:
    command = ["serve", "--upstream", "http://a:1", "--host", host]
    assert main([*command, "--upstream-api-key", "k"]) == 2
    assert "--api-key KEY" in capsys.readouterr().err
    assert not served
    assert main(command) == 0  # no key to lend
    assert main([*command, "--upstream-api-key", "k", "--allow-anonymous"]) == 0
    assert main([*command, "--upstream-api-key", "k", "--api-key", "a"]) == 0
    assert main([*command, "--upstream-api-key", "k", "--admin-key", "a"]) == 0
    served.clear()
    command[2] = "http://user:hidden@a:1"
    assert main(command) == 2
    refusal = capsys.readouterr().err
    assert "the user in an upstream's URL" in refusal and "hidden" not in refusal
    assert not served


def test_upstreams_may_stand_in_the_file(served: list[Settings], tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("upstreams: [http://a:1]\nport: 1\n")
    assert main(["serve", "--config", str(path), "--port", "2"]) == 0
    assert (served[0].upstreams, served[0].port) == (["http://a:1"], 2)


def test_error_without_vllm_names_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setenv("VLLM_PLUGINS", "")
    assert main(["vllm", "some-model"]) == 2
    assert "pip install 'tokenproxy[vllm]'" in capsys.readouterr().err


def test_the_command_is_installed() -> None:
    [script] = entry_points(group="console_scripts", name="tokenproxy")
    assert script.load() is main


def test_serve_as_a_process(mortal: FakeVllm) -> None:
    mortal.canned["/v1/models"] = Canned(b'{"data": []}')  # no model, no tokenizer to load
    mortal.canned["/v1/embeddings"] = Canned(b"[1]")
    command = [sys.executable, "-m", "proxy.cli", "serve", "--upstream", mortal.url, "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        try:
            address = next(
                found for line in process.stderr if (found := re.search(r"running on (http\S+)", line))
            )
            client = httpx.Client(base_url=address[1], trust_env=False)
            assert client.post("/v1/embeddings").text == "[1]"
            process.send_signal(signal.SIGTERM)
            assert "stopped: everything that was sampled is recorded" in process.stderr.read()
            assert process.wait(20) == 0
        finally:
            process.kill()
