"""The errors that this package raises.

TokenizationError
├── InvalidIds            the ids are not a non-empty list of non-negative integers
├── InvalidMessages       the messages cannot be rendered by this template
├── TemplateUnsupported   the template gives no safe place to append after a sampled turn
├── UnfinishedTurn        the turn was cut off, and the caller rejects such turns
├── PrefixMismatch        the recorded ids are not those of the given history
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
