"""The errors that this package raises.

TokenizationError
├── InvalidIds            the ids are not a non-empty list of non-negative integers
├── InvalidMessages       the messages cannot be rendered by this template
├── TemplateUnsupported   the template gives no safe place to append after a sampled turn
├── UnfinishedTurn        the turn was cut off, and the caller rejects such turns
├── PrefixMismatch        the recorded ids are not those of the given history
├── TooManyIds            a text has more ids than its caller allows
└── TokenizerUnavailable  no tokenizer or chat template could be loaded
"""


class TokenizationError(Exception):
    """Base class of all errors that this package raises."""


class InvalidIds(TokenizationError):
    """The ids are not a non-empty list of non-negative integers."""


class InvalidMessages(TokenizationError):
    """The messages cannot be rendered by this template."""


class TemplateUnsupported(TokenizationError):
    """The template gives no safe place to append after a sampled turn."""


class UnfinishedTurn(TokenizationError):
    """The turn was cut off, and the caller rejects such turns (`unfinished="reject"`)."""


class PrefixMismatch(TokenizationError):
    """The recorded ids are not those of the given history."""


class TokenizerUnavailable(TokenizationError):
    """No tokenizer or chat template could be loaded."""


class TooManyIds(TokenizationError):
    """A text has more ids than its caller allows."""

    def __init__(self, count: int, max_ids: int, *, at_least: bool) -> None:
        super().__init__(f"{'at least ' if at_least else ''}{count} ids, of at most {max_ids}")
        self.count = count
        self.max_ids = max_ids
        self.at_least = at_least
        """Whether the text was not tokenised completely, so that it may have more than `count`."""


class Stopped(Exception):
    """The caller no longer waits for the ids. No `TokenizationError`, because nothing failed."""
