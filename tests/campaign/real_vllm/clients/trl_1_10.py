"""Calls the `VLLMClient` of TRL 1.10, unmodified: batches, and two turns of conversations.

    python trl_1_10.py FOLDER URL MODEL     FOLDER: where pip installed TRL; MODEL: folder of the tokenizer

Prints what the client returned, as JSON.
"""

import importlib
import json
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

SAMPLING: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0, "top_p": 0.95, "top_k": 20}
PROMPTS = [[1, 4093, 198, 19556, 2], [1, 4093, 198, 1780]]


def load_client(folder: Path) -> Any:
    """The class, loaded without the `__init__` of its packages, which imports what only training needs."""
    for name, path in (("trl", folder / "trl"), ("trl.generation", folder / "trl" / "generation")):
        package = ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules[name] = package
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it knows older versions of vLLM
        return importlib.import_module("trl.generation.vllm_client").VLLMClient


def main(folder: Path, url: str, model: str) -> dict[str, Any]:
    """The client's results, by the name of the call."""
    from transformers import AutoTokenizer

    client = load_client(folder)(base_url=url, connection_timeout=30.0)
    results = {
        "ids": client.generate(PROMPTS, n=2, logprobs=3, **SAMPLING),
        "text": client.generate(["The sky is", "Rome is"], logprobs=0, **SAMPLING),
        "regex": client.generate(
            PROMPTS[:1], structured_outputs_regex="[0-9]{3}", generation_kwargs={"seed": 7}, max_tokens=8
        ),
    }
    tokenizer = AutoTokenizer.from_pretrained(model)
    conversations = [
        [{"role": "user", "content": f"{text} {uuid4().hex}"}] for text in ("What is 18 * 7?", "Is it warm?")
    ]
    results["first"] = client.chat(conversations, **SAMPLING)
    for conversation, sampled in zip(conversations, results["first"]["completion_ids"], strict=True):
        said = tokenizer.decode(sampled, skip_special_tokens=True)
        conversation += [{"role": "assistant", "content": said}, {"role": "user", "content": "And so?"}]
    results["second"] = client.chat(conversations, **SAMPLING)
    return results


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])))
