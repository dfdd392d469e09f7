import inspect
import subprocess
import sys
import types
from pathlib import Path

import proxy.client
from proxy.client import AsyncClient, Client

_ROOT = Path(__file__).parents[3]


def test_all_is_every_public_name() -> None:
    public = [
        name
        for name, value in vars(proxy.client).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    ]
    assert sorted(public) == proxy.client.__all__


def test_errors_and_methods_are_documented() -> None:
    page = (_ROOT / "docs" / "feed.md").read_text()
    errors = [name for name in proxy.client.__all__ if issubclass(getattr(proxy.client, name), Exception)]
    methods = [name for name in vars(Client) if not name.startswith("_") and name != "close"]
    assert [name for name in [*errors, *methods] if f"`{name}`" not in page and name != "ErrorResponse"] == []


def test_both_clients_have_the_same_methods() -> None:
    def signatures(kind: type) -> dict[str, str]:
        methods = {name: value for name, value in vars(kind).items() if not name.startswith("_")}
        return {
            name: str(inspect.signature(value)).replace("AsyncIterator", "Iterator")
            for name, value in methods.items()
            if name not in ("close", "aclose")
        }

    assert signatures(Client) == signatures(AsyncClient)


def test_import_loads_nothing_else_of_the_proxy() -> None:
    names = ["fastapi", "transformers", "uvicorn", "redis", "aiohttp"]
    program = (
        "import sys, proxy.client;"
        f"print([n for n in {names} if n in sys.modules],"
        "[n for n in sys.modules if n.startswith('proxy.') and not n.startswith('proxy.client')])"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[] []"
