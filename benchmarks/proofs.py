"""The cost of a proof: the CPU time in which `ChatTokenizer.prove` finds out what a template appends."""

import importlib.metadata
import re
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from benchmarks.measure import Effort
from benchmarks.processes import ROOT, scratch_folder
from benchmarks.report import Part, percentile, progress, verdict
from tokenization import ChatTokenizer
from tokenization.locality import Locality, Proof

_P99_S = 3.0
"""Aim: the 99th percentile of the CPU seconds of a proof."""
_QUICK, _SLOWEST = 3, 5
_SPECIAL = re.compile(
    # <|im_end|>, the same with full-width bars, <|turn>, <turn|>
    r"<[|\uff5c][^<>\s'\"{}]{1,40}>|<[a-z_]+\|>"
    # <s>, <end_of_turn>, <SPECIAL_12>, [/INST]
    r"|</?s>|<[be]os>|<(?:start|end|beginning)_of_[a-z]+>|<(?:BOS|EOS)_TOKEN>|<[A-Za-z]+_\d+>|\[/?[A-Z_]+\]"
)
_STOPS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|eot|>", "<|return|>", "<|endoftext|>")


@cache
def _templates() -> dict[str, str]:
    """The templates of trl and of the folder: sources by name, equal ones once."""
    folder = ROOT / ".cache" / "templates"
    files = importlib.metadata.files("trl") or []
    paths = [Path(str(file.locate())) for file in files if file.match("trl/chat_templates/*.jinja")]
    named = {f"trl/{path.stem}": path for path in sorted(paths)}
    named |= {str(path.relative_to(folder).with_suffix("")): path for path in sorted(folder.rglob("*.jinja"))}
    by_text: dict[str, str] = {}
    for name, path in named.items():
        by_text.setdefault(path.read_text("utf-8"), name)
    return {name: text for text, name in by_text.items()}


def rows() -> list[str]:
    """Templates."""
    return list(_templates())


def measure(chosen: Sequence[str], effort: Effort) -> list[Part]:
    """Prove some templates.

    Raises:
        TokenizationError: a tokenizer cannot be made for a template.
    """
    names = chosen[:_QUICK] if effort.quick else chosen
    seconds, proofs = dict[str, float](), dict[str, Proof]()
    with scratch_folder() as folder:
        for number, name in enumerate(names, 1):
            progress(f"proofs: template {number} of {len(names)}: {name}")
            tokenizer = _stand_in(_templates()[name], folder)
            before = time.thread_time()
            proofs[name] = tokenizer.prove()
            seconds[name] = time.thread_time() - before
    every = list(seconds.values())
    p99 = percentile(every, 0.99)
    times = [f"{value:.2f}" for value in (percentile(every), p99, max(every))]
    found = {
        "messages": Counter(proof.after_messages for proof in proofs.values()),
        "results": Counter(proof.after_results for proof in proofs.values()),
    }
    slowest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:_SLOWEST]
    return [
        [
            ["CPU seconds of a proof", "p50", "p99", "max", f"p99 <= {_P99_S:g} s"],
            [f"{len(proofs)} templates", *times, verdict(p99 <= _P99_S)],
        ],
        [
            ["what decides, number of templates", *Locality],
            *([f"after {kind}", *(str(counts[each]) for each in Locality)] for kind, counts in found.items()),
        ],
        [
            ["slowest proofs", "CPU s", "after messages", "after results"],
            *(
                [
                    name,
                    f"{seconds[name]:.2f}",
                    str(proofs[name].after_messages),
                    str(proofs[name].after_results),
                ]
                for name in slowest
            ),
        ],
    ]


def _stand_in(source: str, folder: Path) -> ChatTokenizer:
    """A tokenizer for a template without its model. Its files are written to `folder`."""
    special = sorted(set(_SPECIAL.findall(source)))
    stop = next((stop for stop in _STOPS if stop in special), "</s>")
    backend = Tokenizer(models.BPE())
    every = dict.fromkeys(["<s>", stop, *special])
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in every])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=stop)
    tokenizer.save_pretrained(folder)
    return ChatTokenizer.load(folder, source)
