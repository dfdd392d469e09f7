import os

import pytest

from tokenproxy.app.vllm_launcher import PLUGIN, allowed_plugins, installed_plugins, serve
from tokenproxy.engine.versions import VllmMissing


@pytest.mark.parametrize(
    "before, installed, expected",
    [
        (None, [], "tokenproxy"),
        (None, ["cpu", "lora"], "cpu,lora,tokenproxy"),
        (None, ["cpu", "cpu", "tokenproxy"], "cpu,tokenproxy"),
        ("", ["cpu"], "tokenproxy"),
        ("cpu", ["cpu", "lora"], "cpu,tokenproxy"),
        ("cpu,,lora", [], "cpu,lora,tokenproxy"),
        ("tokenproxy,cpu", [], "tokenproxy,cpu"),
    ],
)
def test_other_plugins_stay_enabled(before: str | None, installed: list[str], expected: str) -> None:
    assert allowed_plugins(before, installed) == expected


def test_plugin_is_not_loaded_by_default() -> None:
    assert PLUGIN not in installed_plugins()


@pytest.mark.parametrize("plugin, expected", [(True, "other,tokenproxy"), (False, "other")])
def test_the_variable_is_set_before_vllm_is_imported(
    monkeypatch: pytest.MonkeyPatch, plugin: bool, expected: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(VllmMissing, match="make install"):
        serve(["model"], plugin=plugin)
    assert os.environ["VLLM_PLUGINS"] == expected
