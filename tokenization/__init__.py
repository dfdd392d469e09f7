"""Exact token ids for chat conversations.

Given the ids an engine consumed and sampled so far, and messages to put after them, this package
produces the next prompt without re-tokenising anything that is already ids. It knows nothing of
HTTP, engines or storage, and can be used on its own:

    from tokenization import ChatTokenizer

    tokenizer = ChatTokenizer.load("path/to/model")
    prompt = tokenizer.render([{"role": "user", "content": "Hi"}])
    ...  # the engine samples `completion` after `prompt`
    following = tokenizer.append(prompt + completion, [{"role": "user", "content": "And then?"}])
    assert following.prompt_ids[: len(prompt + completion)] == prompt + completion
"""

from tokenization.cache import CacheInfo
from tokenization.canonical import CanonicalMessage, canonical, chain
from tokenization.chat import Appended, ChatTokenizer, Continuation
from tokenization.errors import (
    InvalidIds,
    InvalidMessages,
    PrefixMismatch,
    TemplateUnsupported,
    TokenizationError,
    TokenizerUnavailable,
    UnfinishedTurn,
)
from tokenization.splice import replace_prefix_tokens

__all__ = [
    "Appended",
    "CacheInfo",
    "CanonicalMessage",
    "ChatTokenizer",
    "Continuation",
    "InvalidIds",
    "InvalidMessages",
    "PrefixMismatch",
    "TemplateUnsupported",
    "TokenizationError",
    "TokenizerUnavailable",
    "UnfinishedTurn",
    "canonical",
    "chain",
    "replace_prefix_tokens",
]
