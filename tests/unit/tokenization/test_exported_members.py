import inspect
import subprocess
import sys
import types

import tokenization


def test_all_is_every_public_name() -> None:
    public = [
        name
        for name, value in vars(tokenization).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    ]
    assert sorted(public) == tokenization.__all__


def test_every_public_name_has_a_docstring() -> None:
    assert [name for name in tokenization.__all__ if not inspect.getdoc(getattr(tokenization, name))] == []


def test_import_loads_no_proxy_and_no_web_framework() -> None:
    """The package is usable on its own, without HTTP, engines or storage."""
    names = ["aiohttp", "fastapi", "msgspec", "proxy", "starlette", "uvicorn"]
    program = f"import sys, tokenization; print([n for n in {names} if n in sys.modules])"
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"
