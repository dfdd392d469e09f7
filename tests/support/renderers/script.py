"""A logits processor for vLLM: a request samples the ids that it brings, so a test chooses the turns.

vllm serve MODEL --logits-processors tests.support.renderers.script:Script
{"messages": [...], "vllm_xargs": {"script": [1, 2, 3]}}
"""

from functools import partial
from typing import Any

import torch
from vllm import SamplingParams
from vllm.logits_process import LogitsProcessor
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

FLAGS = ("--logits-processors", f"{__name__}:Script")
"""For vLLM; the variable PYTHONPATH must have the root of the repository."""


def asked(ids: list[int]) -> dict[str, Any]:
    """The field of a request that samples these ids."""
    return {"vllm_xargs": {"script": ids}}


class Script(AdapterLogitsProcessor):  # type: ignore[misc]
    """Leaves one possible id for each step of a request that has a script."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> LogitsProcessor | None:
        script = (params.extra_args or {}).get("script")
        return partial(_force, script) if script else None


def _force(script: list[int], sampled: list[int], logits: torch.Tensor) -> torch.Tensor:
    if len(sampled) < len(script):
        logits.fill_(float("-inf"))
        logits[script[len(sampled)]] = 0.0
    return logits
