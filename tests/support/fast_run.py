"""The pytest plugin of the unit and contract layers: no torch, no vLLM, and few examples, always the same.

torch and vLLM cannot be imported, even if they are installed. So the fast tests behave alike after `make dev`
and after `make install`, and after the latter they start sooner: transformers imports torch wherever it is
installed, which takes seconds.
"""

import os
import sys

import hypothesis

os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # else transformers warns that torch is not installed
for name in ("torch", "vllm"):
    sys.modules[name] = None  # type: ignore[assignment]  # the import system raises ModuleNotFoundError for None

hypothesis.settings.register_profile(
    "fast",
    deadline=None,
    max_examples=15,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
