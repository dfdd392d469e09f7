"""`tokenproxy demo`: a conversation with a real model on a real vLLM, with no GPU and no model hub.

It shows on the user's own machine that prompts stay exact. Serving does not need it. Its errors:

    DemoError
    ├── CheckpointError
    │   └── MissingPackageError
    ├── EngineStartError
    └── ConversationError
"""


class DemoError(Exception):
    """Base of the demo's errors. The message tells the user what to do next."""


class CheckpointError(DemoError):
    """The model's checkpoint could not be written."""


class MissingPackageError(CheckpointError):
    """A package that only the demo needs is not installed."""


class EngineStartError(DemoError):
    """vLLM ended, or was not ready in time."""


class ConversationError(DemoError):
    """The server cannot be reached, refused a turn, or returned one without ids."""
