"""All that differs between releases of vLLM for a program in its process.

Each difference is found by asking: whether a module, a name or an argument exists. No version number is
compared, so that a later release works if it still has what is needed, and is refused with a sentence if not.
What an engine behind a socket can do is found by requests: see `discovery`.
"""

import importlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenproxy.base.errors import UsageError
from tokenproxy.base.urls import PORT

if TYPE_CHECKING:
    from fastapi import FastAPI
    from fastapi.routing import APIRoute
    from starlette.routing import BaseRoute

RUST_FRONTEND = "VLLM_USE_RUST_FRONTEND"
"""The variable with which vLLM serves HTTP from a program in Rust, which loads no plugins."""
PLUGIN_GROUP = "vllm.endpoint_plugins"

_ENVIRONMENT = ("vllm.entrypoints.common.startup", "vllm.entrypoints.serve.utils.api_utils")
"""Modules that define `cli_env_setup`: of 0.33, and of the releases before."""
_SCALE_OUT = (
    "vllm.entrypoints.scale_out.render.api_router",
    "vllm.entrypoints.scale_out.derender.api_router",
    "vllm.entrypoints.scale_out.token_in_token_out.api_router",
)
_TESTED = "0.30 to 0.33"
_PARAMETER = re.compile(r"\{[^}]*\}")
_IN_FRONT = "put `tokenproxy serve --upstream URL` in front"


class VllmMissing(UsageError):
    """vLLM is not installed; the message names what to install."""


class UnsupportedVllm(UsageError):
    """The installed vLLM lacks what is needed here; the message says what, and what to do."""


class RouteTaken(UsageError):
    """Another handler answers for one of the plugin's routes; the message names the route."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The parts of vLLM's command line that run `vllm serve`."""

    parser: Any
    """Parses the name of the command and its flags."""
    command: Any
    """The command `serve`."""
    configure_logging: Callable[[Any], object]
    """Configures logging from parsed arguments; does nothing up to 0.30, which has no flags for it."""


def command_line(*, plugin: bool) -> CommandLine:
    """Import the parts of vLLM's command line, and set the environment variables that it sets first.

    Args:
        plugin: whether vLLM must load an endpoint plugin.

    Raises:
        VllmMissing: vLLM, or a package that it needs, is not installed.
        UnsupportedVllm: this vLLM lacks one of the parts, or loads no endpoint plugins.
    """
    if plugin and os.environ.get(RUST_FRONTEND, "0") not in ("", "0"):
        raise UnsupportedVllm(
            f"{RUST_FRONTEND} is set: vLLM's Rust frontend loads no plugins, and the token routes are one. "
            f"Unset it, or start `vllm serve` with it and {_IN_FRONT}"
        )
    try:
        version = getattr(importlib.import_module("vllm"), "__version__", "of an unknown version")
    except ImportError as error:
        raise _missing(error) from error
    try:
        if plugin and _attribute("vllm.plugins", "ENDPOINT_PLUGINS_GROUP") != PLUGIN_GROUP:
            raise ImportError(f"it loads no plugins of the group {PLUGIN_GROUP}", name="vllm.plugins")
        [command] = _attribute("vllm.entrypoints.cli.serve", "cmd_init")()
        _first(_ENVIRONMENT, "cli_env_setup")()
        parser = _attribute("vllm.utils.argparse_utils", "FlexibleArgumentParser")(description="vLLM CLI")
        serve = command.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
        if plugin:
            serve.set_defaults(port=PORT)  # where `tokenproxy run`, `top` and the examples look for it
        return CommandLine(parser, command, _optional("vllm.logger", "configure_logging_from_args"))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        if isinstance(error, ImportError) and not (error.name or "").startswith("vllm"):
            raise _missing(error) from error  # a library that vLLM needs
        raise UnsupportedVllm(
            f"vLLM {version} cannot run the token routes: {error}. Install vLLM {_TESTED}, or start "
            f"this one with `vllm serve` and {_IN_FRONT}"
        ) from error


def _missing(error: ImportError) -> VllmMissing:
    return VllmMissing(
        f"vLLM cannot be imported ({error}): pip install 'tokenproxy[vllm]' on a machine with a GPU, "
        "or `make install` in a clone for the CPU build"
    )


def _first(modules: Sequence[str], name: str) -> Any:
    """The attribute of the first of some modules that has it.

    Raises:
        ImportError: none has it.
    """
    for module in modules:
        try:
            return _attribute(module, name)
        except ImportError:
            continue
    raise ImportError(f"there is no `{name}` in {' or '.join(modules)}", name=modules[0])


def _attribute(module: str, name: str) -> Any:
    """An attribute of a module.

    Raises:
        ImportError: there is no such module, or it lacks the attribute.
    """
    imported = importlib.import_module(module)
    if not hasattr(imported, name):
        raise ImportError(f"there is no `{name}` in {module}", name=module)
    return getattr(imported, name)


def _optional(module: str, name: str) -> Callable[[Any], object]:
    """A function of a module; one that does nothing if the module lacks it."""
    return getattr(importlib.import_module(module), name, lambda argument: None)


def scale_out_routes() -> "list[BaseRoute]":
    """vLLM's render, generate and derender routes, which its application has with --enable-scale-out only.

    vLLM creates what serves them in any case. Empty if this vLLM keeps them elsewhere.
    """
    try:
        modules = [importlib.import_module(name) for name in _SCALE_OUT]
    except ImportError:
        return []
    return [route for module in modules for route in module.router.routes]


def put_first(app: "FastAPI", added: "Sequence[BaseRoute]") -> None:
    """Let a plugin's routes answer before all others of the application, and on its OpenAPI page.

    Up to 0.31 vLLM leaves a plugin's routes behind its own, so that its own answer; from 0.32 on it removes
    those of its own that have the same path and method, as this does. Routes that are no operations, such as
    one for all other paths, stay last.
    """
    from fastapi.routing import APIRoute

    operations = [route for route in added if isinstance(route, APIRoute)]
    others = [route for route in added if route not in operations]
    kept = [route for route in app.router.routes if route not in added]
    for operation in operations:
        kept = [rest for route in kept if (rest := _without(route, operation)) is not None]
    app.router.routes[:] = [*operations, *kept, *others]
    app.openapi_schema = None


def _without(route: "BaseRoute", operation: "APIRoute") -> "BaseRoute | None":
    """A route without the methods of another one of the same path; None if it has no others."""
    from fastapi.routing import APIRoute

    if not isinstance(route, APIRoute) or route.path != operation.path:
        return route
    if not route.methods & operation.methods:
        return route
    rest = copy(route)
    rest.methods = route.methods - operation.methods
    return rest if rest.methods else None


def check_first(app: "FastAPI", added: "Iterable[BaseRoute]") -> None:
    """Check that a plugin's routes answer for their paths, after vLLM and other plugins added theirs.

    Raises:
        RouteTaken: another handler answers for one of them.
    """
    from fastapi.routing import APIRoute
    from starlette.routing import Match

    operations = [route for route in added if isinstance(route, APIRoute)]
    for operation in operations:
        for method in operation.methods:
            path = _PARAMETER.sub("1", operation.path)
            scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
            matching = (route for route in app.router.routes if route.matches(scope)[0] is Match.FULL)
            found = next(matching, None)
            if found not in operations:
                raise RouteTaken(
                    f"{_handler(found)} answers {method} {operation.path} in place of tokenproxy, which "
                    "would record nothing there: remove the plugin that adds it from VLLM_PLUGINS"
                )


def _handler(route: "BaseRoute | None") -> str:
    """The function that serves a route, by its name."""
    handler = getattr(route, "endpoint", None) or route
    module, name = getattr(handler, "__module__", None), getattr(handler, "__qualname__", None)
    return f"{module}.{name}" if module and name else "another handler"
