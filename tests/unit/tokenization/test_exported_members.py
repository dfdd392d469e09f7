import subprocess
import sys
import types

import chat_tokenizer


def test_all_is_every_public_name() -> None:
    values = {name: value for name, value in vars(chat_tokenizer).items() if not name.startswith("_")}
    public = [name for name, value in values.items() if not isinstance(value, types.ModuleType)]
    assert sorted(public) == chat_tokenizer.__all__


def test_import_loads_no_proxy_and_no_web_framework() -> None:
    """The package is usable on its own, without HTTP, engines or storage."""
    names = ["aiohttp", "fastapi", "starlette", "tokenproxy", "uvicorn"]
    program = f"import sys, chat_tokenizer; print([n for n in {names} if n in sys.modules])"
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"
