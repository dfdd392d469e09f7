"""What a client asked to see of a completion."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Visible:
    """What a client asked to see. The engine is always asked for ids, log-probabilities and usage."""

    ids: bool
    logprobs: bool
    usage: bool = False
    """Of a stream: the number of its tokens, at its end."""
    running_usage: bool = False
    """Of a stream: the number of its tokens so far, in each chunk."""
    reasoning: bool = True
    """If false, `ids` and `logprobs` must be false too: they would reveal the reasoning."""

    @property
    def everything(self) -> bool:
        """Whether the client gets whole completions as the engine sent them."""
        return self.ids and self.logprobs and self.reasoning

    @property
    def every_chunk(self) -> bool:
        """Whether the client gets the chunks of a stream as the engine sent them."""
        return self.everything and self.usage and self.running_usage
