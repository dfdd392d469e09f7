"""Exact token ids for chat conversations.

Given the ids of a conversation so far (prompt and completion) and new messages, this package builds the
next prompt without re-tokenising the ids. It depends on no HTTP framework, engine or storage, so it can be
used on its own:

    from chat_tokenizer import ChatTokenizer

    tokenizer = ChatTokenizer.load("path/to/model")
    prompt = tokenizer.render([{"role": "user", "content": "Hi"}])
    ...  # the engine samples `completion` after `prompt`
    appended = tokenizer.append(prompt + completion, [{"role": "user", "content": "And then?"}])
    assert appended.prompt_ids[: len(prompt + completion)] == prompt + completion
"""

from chat_tokenizer.append import Appended
from chat_tokenizer.cache import CacheInfo
from chat_tokenizer.canonical import CanonicalMessage, canonical, chain
from chat_tokenizer.chat import ChatTokenizer
from chat_tokenizer.errors import (
    InvalidIds,
    InvalidMessages,
    PrefixMismatch,
    TemplateUnsupported,
    TokenizationError,
    TokenizerUnavailable,
    UnfinishedTurn,
)
from chat_tokenizer.history_check import check_history

__all__ = [
    "Appended",
    "CacheInfo",
    "CanonicalMessage",
    "ChatTokenizer",
    "InvalidIds",
    "InvalidMessages",
    "PrefixMismatch",
    "TemplateUnsupported",
    "TokenizationError",
    "TokenizerUnavailable",
    "UnfinishedTurn",
    "canonical",
    "chain",
    "check_history",
]
