"""A pytest plugin for the fast tests: torch and vLLM cannot be imported, even if they are installed.

With it the fast tests behave alike after `make dev` and after `make install`. After the latter they also
start sooner, because transformers imports torch wherever it is installed, which takes seconds.
"""

import sys

for name in ("torch", "vllm"):
    sys.modules[name] = None  # type: ignore[assignment]  # the import system raises ModuleNotFoundError for None
