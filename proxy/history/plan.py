"""How the prompt of one request comes about."""

from dataclasses import dataclass, field

from proxy.history.conversation import Asked, Conversation
from proxy.history.known import Known
from proxy.history.turn import new_id


@dataclass(slots=True)
class Plan:
    """How the prompt of a request comes about, and where its turn will stand."""

    asked: Asked
    conversation: Conversation | None
    """None for messages that could not be read."""
    model: str
    rollout: str
    source: str = "rendered"
    reason: str = ""
    prompt: bytes = b""
    """The prompt as a JSON array of ids; empty where the engine renders it."""
    parent: Known | None = None
    added: list[int] = field(default_factory=list)
    """Ids behind those of the parent."""
    end: int = -1
    """Index of the parent's message in the request."""
    candidates: int = 1
    choices: int = 1
    """How many completions were asked for."""
    whole: bool = True
    """Whether the request's messages are the whole conversation, so that it can be found by them."""
    request: str = field(default_factory=new_id)

    @property
    def reused(self) -> int:
        """Ids of the prompt that are those of the turn it continues."""
        return self.parent.count if self.parent else 0
