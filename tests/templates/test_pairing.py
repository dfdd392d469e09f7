"""The tokenizers of the matrix are what they claim to be."""

import json

from tokenizers import Tokenizer

from proxy.demo.checkpoint import ensure_checkpoint
from tests.templates.pairing import byte_level, smollm2_merges


def test_the_stored_merges_are_the_first_of_the_demos_model() -> None:
    description = json.loads((ensure_checkpoint() / "tokenizer.json").read_text("utf-8"))
    added = {token["content"] for token in description["added_tokens"]}
    model = description["model"]
    vocab, merges = smollm2_merges()
    by_rank = sorted(model["vocab"].keys() - added, key=model["vocab"].get)
    assert list(vocab) == by_rank[:6000]
    assert merges == [tuple(pair) for pair in model["merges"] if {*pair, "".join(pair)} <= vocab.keys()]

    model |= {"vocab": vocab, "merges": merges}
    cut = Tokenizer.from_str(json.dumps({**description, "added_tokens": [], "post_processor": None}))
    assert json.loads(byte_level().to_str()) == json.loads(cut.to_str())
