"""The environment of each program."""

import json
import tomllib
from pathlib import Path

import pytest

from tokenproxy.agents.programs import (
    NO_KEY,
    PROGRAMS,
    Target,
    claude_variables,
    codex_variables,
    openai_variables,
    opencode_variables,
    variables_for,
)

_PLAIN = Target("http://127.0.0.1:8100", "smollm2")
_FULL = Target("https://proxy.example", 'org/"m"', 8192, "run-7", "KEY")


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "tokenproxy"


def test_claude() -> None:
    plain, full = claude_variables(_PLAIN), claude_variables(_FULL)
    assert plain["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8100"  # the SDK adds /v1
    assert full["ANTHROPIC_BASE_URL"] == "https://proxy.example/sessions/run-7"
    assert (plain["ANTHROPIC_AUTH_TOKEN"], full["ANTHROPIC_AUTH_TOKEN"]) == (NO_KEY, "KEY")
    assert {value for name, value in full.items() if name.endswith("_MODEL")} == {'org/"m"'}
    assert {"ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"} <= full.keys()
    assert full["ANTHROPIC_API_KEY"] is None  # a user's own key never reaches the proxy
    assert (full["CLAUDE_CODE_MAX_CONTEXT_TOKENS"], full["CLAUDE_CODE_MAX_OUTPUT_TOKENS"]) == ("8192", "2048")
    assert "CLAUDE_CODE_MAX_OUTPUT_TOKENS" not in plain
    assert claude_variables(Target("http://a", "m", 10**6))["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "32000"


def test_codex(state: Path) -> None:
    variables = codex_variables(_FULL)
    home = Path(str(variables["CODEX_HOME"]))
    assert home.parent == state / "codex"
    text = (home / "config.toml").read_text()
    config = tomllib.loads(text)
    assert (config["model"], config["model_context_window"]) == ('org/"m"', 8192)
    provider = config["model_providers"][config["model_provider"]]
    assert (provider["base_url"], provider["wire_api"]) == ("https://proxy.example/v1", "responses")
    assert variables[provider["env_key"]] == "KEY"
    assert variables[provider["env_http_headers"]["X-Session-ID"]] == "run-7"
    assert '"KEY"' not in text
    assert codex_variables(_PLAIN)["TOKENPROXY_SESSION"] is None


def test_codex_keeps_its_folder_and_what_it_wrote_there() -> None:
    homes = [codex_variables(target)["CODEX_HOME"] for target in (_FULL, _PLAIN, _FULL)]
    assert homes[0] == homes[2] != homes[1]
    other_session = Target(_FULL.url, _FULL.model, 8192, "run-8", "OTHER")
    assert codex_variables(other_session)["CODEX_HOME"] == homes[0]  # where `resume` finds conversations
    file = Path(str(homes[0])) / "config.toml"
    learnt = file.read_text() + '[projects."/a"]\ntrust_level = "trusted"\n'
    file.write_text(learnt)
    codex_variables(_FULL)
    assert file.read_text() == learnt


def test_openai_and_opencode() -> None:
    variables = openai_variables(_FULL)
    base = "https://proxy.example/sessions/run-7/v1"
    assert (variables["OPENAI_BASE_URL"], variables["OPENAI_API_BASE"]) == (base, base)
    assert openai_variables(_PLAIN)["OPENAI_API_KEY"] == NO_KEY
    config = json.loads(str(opencode_variables(_FULL)["OPENCODE_CONFIG_CONTENT"]))
    provider = config["provider"]["tokenproxy"]
    assert provider["options"] == {"baseURL": base, "apiKey": "KEY"}
    assert provider["models"]['org/"m"']["limit"] == {"context": 8192, "output": 2048}
    assert config["model"] == 'tokenproxy/org/"m"'


def test_the_proxy_is_reached_past_http_proxies() -> None:
    assert "NO_PROXY" not in variables_for(["openai"], _PLAIN, {"no_proxy": "a"})
    variables = variables_for(list(PROGRAMS), _PLAIN, {"https_proxy": "http://p:1", "NO_PROXY": "a.example"})
    assert (variables["NO_PROXY"], variables["no_proxy"]) == ("a.example,127.0.0.1", "127.0.0.1")
