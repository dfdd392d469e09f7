import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.cli import main
from proxy.settings import Settings, SettingsError, load_settings

_CONFIGS = sorted((Path(__file__).parents[1] / "config").glob("*.yaml"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "settings.yaml"
    path.write_text("port: 1\nhost: file\nbody_limit_bytes: 10\nupstreams: [http://a:1]\n")
    return path


def test_file_below_environment_below_flags(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENPROXY_PORT", "2")
    monkeypatch.setenv("TOKENPROXY_HOST", "environment")
    settings = load_settings(file, port=3, host=None)
    assert (settings.port, settings.host, settings.body_limit_bytes) == (3, "environment", 10)
    assert settings.upstreams == ["http://a:1"]


def test_what_is_given_nowhere_has_its_default(file: Path) -> None:
    settings = load_settings(file)
    assert settings.encoder_threads == Settings().encoder_threads
    assert load_settings().model_dump() == Settings().model_dump()


def test_upstreams_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENPROXY_UPSTREAMS", "http://a:1/v1/, http://b:2")
    assert load_settings().upstreams == ["http://a:1", "http://b:2"]


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENPROXY_PORT", "")
    monkeypatch.setenv("TOKENPROXY_CONFIG", "the plugin's own")
    assert load_settings().model_dump() == Settings().model_dump()


@pytest.mark.parametrize(
    "flags, name",
    [
        ({"port": 70000}, "port"),
        ({"port": "many"}, "port"),
        ({"upstreams": ["a:1"]}, "upstreams"),
        ({"upstreams": ["ftp://a:1"]}, "upstreams"),
        ({"token_in": "guess"}, "token_in"),
        ({"body_limit_bytes": 0}, "body_limit_bytes"),
        ({"connect_timeout_s": 0}, "connect_timeout_s"),
        ({"watch_interval_s": -1}, "watch_interval_s"),
        ({"encoder_threads": 0}, "encoder_threads"),
        ({"log_level": "loud"}, "log_level"),
        ({"no_such_setting": 1}, "no_such_setting"),
    ],
)
def test_errors_name_the_setting(flags: dict[str, Any], name: str) -> None:
    with pytest.raises(SettingsError, match=f"^{name}"):
        load_settings(**flags)


@pytest.mark.parametrize(
    "name, value", [("port", "many"), ("upstreams", "a:1"), ("trust_remote_code", "perhaps")]
)
def test_errors_in_the_environment_name_the_setting(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"TOKENPROXY_{name.upper()}", value)
    with pytest.raises(SettingsError, match=name):
        load_settings()


@pytest.mark.parametrize(
    "content, complaint",
    [
        ("prot: 1", "prot"),
        ("port: many", "port"),
        ("upstreams: a:1", "upstreams"),
        ("port: [1", "settings.yaml"),
        ("- port", "settings.yaml"),
        ("port", "settings.yaml"),
    ],
)
def test_errors_in_the_file(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(content)
    with pytest.raises(SettingsError, match=complaint):
        load_settings(path)


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("# nothing\n")
    assert load_settings(path).model_dump() == Settings().model_dump()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no settings file at .*missing\.yaml"):
        load_settings(tmp_path / "missing.yaml")


def test_a_file_that_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot read the settings file"):
        load_settings(tmp_path)


def test_keys_are_not_shown() -> None:
    settings = load_settings(api_key="hidden", upstream_api_key="hidden")
    assert "hidden" not in repr(settings) + str(settings)


def test_every_setting_says_what_it_is() -> None:
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_has_a_flag(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    flag = "--upstream" if name == "upstreams" else "--" + name.replace("_", "-")
    assert re.search(rf"  {flag}[ ,\n]", capsys.readouterr().out)


@pytest.mark.parametrize("path", _CONFIGS, ids=lambda path: path.name)
def test_ready_configurations_hold(path: Path) -> None:
    settings = load_settings(path)
    assert settings.upstreams
    for name, value in yaml.safe_load(path.read_text()).items():
        assert getattr(settings, name) == value


def test_there_are_ready_configurations() -> None:
    assert _CONFIGS
