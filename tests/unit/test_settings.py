"""Settings: file below environment below flags, errors that name the setting, the reference in the docs."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tokenproxy.cli.main import main
from tokenproxy.settings import Settings, SettingsError, flag_name, load_settings

_CONFIGS = sorted((Path(__file__).parents[2] / "config").glob("*.yaml"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "settings.yaml"
    path.write_text("port: 1\nhost: file\nadmin_key: [d, e]\nupstreams: [http://a:1]\n")
    return path


def test_file_below_environment_below_flags(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENPROXY_PORT", "2")
    monkeypatch.setenv("TOKENPROXY_HOST", "environment")
    monkeypatch.setenv("TOKENPROXY_API_KEY", "a,b, c")
    settings = load_settings(file, port=3, host=None)
    assert (settings.port, settings.host, settings.upstreams) == (3, "environment", ["http://a:1"])
    assert [key.get_secret_value() for key in settings.api_key] == ["a", "b", "c"]
    assert [key.get_secret_value() for key in settings.admin_key] == ["d", "e"]


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENPROXY_PORT", "")
    monkeypatch.setenv("TOKENPROXY_CONFIG", "the plugin's own")
    assert load_settings().model_dump() == Settings().model_dump()


def test_an_unknown_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("URL", "SERVICE_HOST", "ADMIN_SERVICE_PORT_HTTP", "PORT_8100_TCP_ADDR"):
        monkeypatch.setenv(f"TOKENPROXY_{name}", "not a setting's")
    assert load_settings().model_dump() == Settings().model_dump()
    monkeypatch.setenv("TOKENPROXY_NO_SUCH_SETTING", "1")
    with pytest.raises(SettingsError, match=r"^TOKENPROXY_NO_SUCH_SETTING: there is no such setting"):
        load_settings()
    monkeypatch.delenv("TOKENPROXY_NO_SUCH_SETTING")
    monkeypatch.setenv("TOKENPROXY_PROT", "1")
    with pytest.raises(SettingsError, match=r"did you mean TOKENPROXY_PORT\?"):
        load_settings()


@pytest.mark.parametrize(
    "flags, name",
    [
        ({"port": 70000}, "port"),
        ({"upstreams": ["a:1"]}, "upstreams"),
        ({"overflow": "guess"}, "overflow"),
        ({"api_key": ["a", " "]}, "api_key: .*must not be empty"),
        ({"api_key_file": "missing.yaml"}, "api_key_file"),
        ({"tls_cert": "missing.pem", "tls_key": __file__}, "tls_cert"),
        ({"tls_key": __file__}, "settings: .*tls_cert.* and .*tls_key.* belong together"),
        ({"allowed_hosts": ["http://a.example"]}, "allowed_hosts"),
        ({"cors_origins": ["https://app.example.com/"]}, "cors_origins"),
        ({"no_such_setting": 1}, "no_such_setting: there is no such setting"),
    ],
)
def test_errors_name_the_setting(flags: dict[str, Any], name: str) -> None:
    with pytest.raises(SettingsError, match=f"^{name}"):
        load_settings(**flags)


@pytest.mark.parametrize(
    "content, complaint",
    [
        ("prot: 1", r"^prot in \S+settings.yaml: there is no such setting; did you mean port\?"),
        ("port: [1", "settings.yaml"),
        ("- port", "settings.yaml"),
    ],
)
def test_errors_in_the_file(file: Path, content: str, complaint: str) -> None:
    file.write_text(content)
    with pytest.raises(SettingsError, match=complaint):
        load_settings(file)


def test_keys_are_not_shown() -> None:
    keys: dict[str, Any] = {"api_key": ["hidden"], "admin_key": ["hidden"], "upstream_api_key": "hidden"}
    settings = load_settings(upstreams=["http://user:hidden@a:1"], **keys)
    assert "hidden" not in repr(settings) + str(settings)


@pytest.mark.parametrize("url", ["ftp://user:hidden@a:1", "http://user:hidden@", "http://user:hidden@a:x"])
def test_no_error_shows_the_password_of_an_upstream(url: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings(upstreams=[url])
    assert "hidden" not in str(refused.value)


def test_every_setting_has_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    flags = [flag_name(name, field) for name, field in Settings.model_fields.items()]
    assert [flag for flag in flags if not re.search(rf"  {flag}[ ,\n]", text)] == []


# --- the reference in docs/settings.md


def _documented() -> dict[str, list[str]]:
    """The rows of the reference, by the name of the setting."""
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in page.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in row] for row in rows]
    return {row[0].strip("`"): row[1:] for row in cells if row[0].strip("`") in Settings.model_fields}


def _shown_default(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A default as the reference shows it."""
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/user")
    default = Settings.model_fields[name].get_default(call_default_factory=True)
    if default in (None, []):
        return "none"
    text = str(default).lower() if isinstance(default, bool) else str(default).removesuffix(".0")
    return f"`{text}`".replace("/home/user", "~")


def test_the_reference_has_every_setting_and_no_other() -> None:
    assert list(_documented()) == list(Settings.model_fields)


@pytest.mark.parametrize("name", Settings.model_fields)
def test_the_reference_is_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flag, variable, default, meaning = _documented()[name]
    assert flag == f"`{flag_name(name, Settings.model_fields[name])}`"
    assert variable == f"`TOKENPROXY_{name.upper()}`"
    assert re.fullmatch(re.escape(_shown_default(name, monkeypatch)) + r"( \(.*\))?", default)
    assert meaning


@pytest.mark.parametrize("path", _CONFIGS, ids=lambda path: path.name)
def test_ready_configurations_hold(path: Path) -> None:
    settings = load_settings(path)
    assert settings.upstreams
    for name, value in yaml.safe_load(path.read_text()).items():
        assert getattr(settings, name) == value
