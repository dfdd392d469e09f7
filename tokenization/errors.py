"""What can go wrong between text and ids.

TokenizationError
├── InvalidIds            the ids are not a non-empty list of non-negative integers
├── InvalidMessages       the messages cannot be rendered by this template
├── TemplateUnsupported   the template gives no safe place to append after a sampled turn
├── UnfinishedTurn        the turn was cut off, and such turns are to be rejected
├── PrefixMismatch        a history and its recorded ids do not belong together
└── TokenizerUnavailable  no tokenizer or chat template could be loaded
"""


class TokenizationError(Exception):
    """Base of everything this package raises on purpose."""


class InvalidIds(TokenizationError):
    """The ids are not a non-empty list of non-negative integers."""


class InvalidMessages(TokenizationError):
    """The messages cannot be rendered by this template."""


class TemplateUnsupported(TokenizationError):
    """The template gives no safe place to append after a sampled turn."""


class UnfinishedTurn(TokenizationError):
    """The turn was cut off, and such turns are to be rejected."""


class PrefixMismatch(TokenizationError):
    """A history and the ids recorded for it do not belong together."""


class TokenizerUnavailable(TokenizationError):
    """No tokenizer or chat template could be loaded."""
