"""What can go wrong in the demo.

DemoError
├── CheckpointError
│   └── MissingPackageError
├── EngineStartError
└── ConversationError
"""


class DemoError(Exception):
    """Base of the demo's errors. The message is for the person at the terminal: what to do next."""


class CheckpointError(DemoError):
    """The model's checkpoint could not be written."""


class MissingPackageError(CheckpointError):
    """A package that only the demo needs is not installed."""


class EngineStartError(DemoError):
    """vLLM ended or stayed silent before it was ready to serve."""


class ConversationError(DemoError):
    """The server refused a turn, or answered one without the ids it was asked for."""
