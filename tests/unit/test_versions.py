"""What differs between releases of vLLM, on modules that stand for those of each release."""

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from tokenproxy.engine.versions import (
    PLUGIN_GROUP,
    RUST_FRONTEND,
    RouteTaken,
    UnsupportedVllm,
    VllmMissing,
    check_first,
    command_line,
    put_first,
)
from tokenproxy.settings import Settings

Modules = dict[str, dict[str, object]]


def _serve(parsers: Any) -> ArgumentParser:
    parser: ArgumentParser = parsers.add_parser("serve")
    parser.add_argument("--port", type=int, default=8000)
    return parser


_COMMAND = SimpleNamespace(name="serve", subparser_init=_serve)
_COMMON: Modules = {
    "vllm": {"__version__": "0.99.0"},
    "vllm.plugins": {"ENDPOINT_PLUGINS_GROUP": PLUGIN_GROUP},
    "vllm.entrypoints.cli.serve": {"cmd_init": lambda: [_COMMAND]},
    "vllm.utils.argparse_utils": {"FlexibleArgumentParser": ArgumentParser},
    "vllm.logger": {},
}
_STARTUP = "TESTS_STARTUP"


def _started(by: str) -> Callable[[], None]:
    return lambda: os.environ.update({_STARTUP: by})


_OLD_STARTUP: Modules = {"vllm.entrypoints.serve.utils.api_utils": {"cli_env_setup": _started("old")}}
_NEW_STARTUP: Modules = {"vllm.entrypoints.common.startup": {"cli_env_setup": _started("new")}}
_LOGGING: Modules = {
    "vllm.logger": {"configure_logging_from_args": lambda arguments: f"configured by {arguments}"}
}
Install = Callable[[Modules], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Replaces vLLM, which may be installed, by modules with some attributes."""
    monkeypatch.delenv(RUST_FRONTEND, raising=False)
    monkeypatch.setenv(_STARTUP, "")
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)

    def install(modules: Modules) -> None:
        parents = {name[:at] for name in modules for at, letter in enumerate(name) if letter == "."}
        for name in sorted({*parents, *modules}):
            module = ModuleType(name)
            module.__path__ = []  # a package: what is not among its modules is missing
            for attribute, value in modules.get(name, {}).items():
                setattr(module, attribute, value)
            monkeypatch.setitem(sys.modules, name, module)

    return install


@pytest.mark.parametrize(
    ("modules", "environment", "logging"),
    [
        (_OLD_STARTUP, "old", None),
        (_OLD_STARTUP | _LOGGING, "old", "configured by flags"),
        (_NEW_STARTUP | _LOGGING, "new", "configured by flags"),
    ],
    ids=["0.30", "0.31 and 0.32", "0.33"],
)
def test_the_command_line_of_each_release_is_found(
    install: Install, modules: Modules, environment: str, logging: str | None
) -> None:
    install(_COMMON | modules)
    line = command_line(plugin=True)
    assert line.command is _COMMAND
    assert os.environ[_STARTUP] == environment
    assert line.parser.parse_args(["serve"]) == Namespace(subparser="serve", port=Settings().port)
    assert line.parser.parse_args(["serve", "--port", "1"]).port == 1
    assert command_line(plugin=False).parser.parse_args(["serve"]).port == 8000
    assert line.configure_logging("flags") == logging


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"vllm.entrypoints.common.startup": {}}, "there is no `cli_env_setup` in vllm.entrypoints.common"),
        (_NEW_STARTUP | {"vllm.entrypoints.cli.serve": {}}, "there is no `cmd_init`"),
        (_NEW_STARTUP | {"vllm.entrypoints.cli.serve": {"cmd_init": lambda: []}}, "not enough values"),
        (_NEW_STARTUP | {"vllm.entrypoints.cli.serve": {"cmd_init": lambda: [object()]}}, "subparser_init"),
        (_NEW_STARTUP | {"vllm.plugins": {}}, "there is no `ENDPOINT_PLUGINS_GROUP`"),
        (
            _NEW_STARTUP | {"vllm.plugins": {"ENDPOINT_PLUGINS_GROUP": "vllm.routes"}},
            "no plugins of the group",
        ),
    ],
)
def test_an_unknown_release_is_refused_with_a_sentence(
    install: Install, changed: Modules, problem: str
) -> None:
    install(_COMMON | changed)
    with pytest.raises(UnsupportedVllm) as caught:
        command_line(plugin=True)
    message = str(caught.value)
    assert problem in message
    assert message.startswith("vLLM 0.99.0 cannot run")
    assert "tokenproxy serve --upstream URL" in message


def test_a_release_without_plugins_still_starts_stock(install: Install) -> None:
    install(_COMMON | _OLD_STARTUP | {"vllm.plugins": {}})
    assert command_line(plugin=False).command is _COMMAND


@pytest.mark.parametrize(
    "problem",
    [ModuleNotFoundError("No module named 'torch'", name="torch"), ImportError("torch 2.13 is required")],
)
def test_a_missing_library_is_not_called_an_unknown_release(install: Install, problem: ImportError) -> None:
    def broken() -> None:
        raise problem

    install(_COMMON | _NEW_STARTUP | {"vllm.entrypoints.cli.serve": {"cmd_init": broken}})
    with pytest.raises(VllmMissing, match="torch"):
        command_line(plugin=True)


def test_the_rust_frontend_is_refused_before_vllm_is_imported(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUST_FRONTEND, "1")
    with pytest.raises(UnsupportedVllm, match=f"{RUST_FRONTEND} is set.*loads no plugins"):
        command_line(plugin=True)
    install(_COMMON | _OLD_STARTUP)
    assert command_line(plugin=False).command is _COMMAND
    monkeypatch.setenv(RUST_FRONTEND, "0")
    assert command_line(plugin=True).command is _COMMAND


# --- routes


def _added(app: FastAPI, path: str, *methods: str) -> APIRoute:
    async def ours() -> None: ...

    app.add_api_route(path, ours, methods=list(methods))
    route = app.router.routes[-1]
    assert isinstance(route, APIRoute)
    return route


def _operations(app: FastAPI) -> list[tuple[str, set[str]]]:
    return [(route.path, set(route.methods)) for route in app.router.routes if isinstance(route, APIRoute)]


def test_added_routes_answer_first_and_other_methods_stay() -> None:
    app = FastAPI(openapi_url=None)
    theirs = _added(app, "/v1/chat/completions", "GET", "POST")
    other = _added(app, "/health", "GET")
    ours = _added(app, "/v1/chat/completions", "POST")
    put_first(app, [ours])
    assert app.router.routes[0] is ours
    assert app.router.routes[-1] is other
    assert _operations(app) == [
        ("/v1/chat/completions", {"POST"}),
        ("/v1/chat/completions", {"GET"}),
        ("/health", {"GET"}),
    ]
    assert theirs.methods == {"GET", "POST"}  # an application that shares it keeps all of it
    check_first(app, [ours])


def test_a_route_that_another_handler_answers_is_named() -> None:
    app = FastAPI(openapi_url=None)
    ours = [_added(app, "/v1/responses/{response_id}", "GET"), _added(app, "/v1/chat/completions", "POST")]
    put_first(app, ours)
    taking = _added(app, "/v1/chat/completions", "POST")
    app.router.routes.insert(0, app.router.routes.pop())
    with pytest.raises(
        RouteTaken, match="answers POST /v1/chat/completions in place of tokenproxy"
    ) as caught:
        check_first(app, ours)
    assert f"{taking.endpoint.__module__}.{taking.endpoint.__qualname__}" in str(caught.value)


def test_a_route_that_was_removed_is_named() -> None:
    app = FastAPI(openapi_url=None)
    ours = [_added(app, "/v1/sessions/{session}", "GET")]
    app.router.routes.clear()
    with pytest.raises(RouteTaken, match=r"another handler answers GET /v1/sessions/\{session\}"):
        check_first(app, ours)
