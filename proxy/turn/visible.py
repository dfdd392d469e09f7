"""The parts of a completion that a client requested."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Visible:
    """The requested parts. The proxy itself always requests ids, log-probabilities and usage."""

    ids: bool
    logprobs: bool
    usage: bool = False
    """For a stream: whether its end reports the number of tokens."""
    running_usage: bool = False
    """For a stream: whether each chunk reports the number of tokens so far."""
    reasoning: bool = True
    """If false, `ids` and `logprobs` must be false too: they would reveal the reasoning."""

    on_messages: bool = False
    """Whether each message of a whole completion holds its ids and log-probabilities (NeMo-RL's contract)."""

    @property
    def everything(self) -> bool:
        """Whether the client gets whole completions as the engine sent them."""
        return self.ids and self.logprobs and self.reasoning

    @property
    def every_chunk(self) -> bool:
        """Whether the client gets the chunks of a stream as the engine sent them."""
        return self.everything and self.usage and self.running_usage


EVERYTHING = Visible(ids=True, logprobs=True, usage=True, running_usage=True)
"""For a response that is passed on as it is."""
