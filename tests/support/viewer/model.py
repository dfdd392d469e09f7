"""The model of recorded sessions: its tokenizer halves emoji, and has marks of thinking and tool calls."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.support.tiny_model import CHATML, SPECIAL_TOKENS, TinyModel, save_model

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tokens of their own that are not special, as in the Qwen models."""
EMOJI = "😀😁😂😃😄😅😆😇😈😉😊😋😌😍😎😏"
"""Each is two ids: three bytes that all of them share, and the last byte."""
_TEXT = """
    the of and to in is that it was for on are with as they at be this from have or by one had not but
    what all were when we there can an your which their said if do will each about how up out them then
    she many some so these would other into has more her two like him see time could no make than first
    been its who now people my made over did down only way find use may water long little very after
    words called just where most know file line test error return value function import class def print
    read write open close list index range true false
"""
WORDS = tuple(_TEXT.split())
_VOCABULARY = 700


def make_viewer_model(folder: Path) -> TinyModel:
    """Train the tokenizer and save it as a model folder; the same each time."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        # each emoji is in the texts twice, so its last byte is never merged
        min_frequency=3,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sentences = [" ".join(WORDS)] * 4 + ["system\nuser\nassistant\ntool\n"] * 4
    tokenizer.train_from_iterator([*sentences, *(f"{each} {each}" for each in EMOJI)], trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return save_model(folder, tokenizer, CHATML, tokenizer.get_vocab_size())
