"""What a client asked to see of what is recorded."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Visible:
    """What the client asked to see of what is recorded."""

    ids: bool
    logprobs: bool
    usage: bool = False
    """Of a stream: the number of tokens, at its end."""
    running_usage: bool = False
    """Of a stream: the number of tokens so far, in each chunk."""
    reasoning: bool = True
    """If False, ids and log-probabilities are not visible either: they would reveal it."""

    @property
    def everything(self) -> bool:
        """Whether a whole completion can be passed on as it is."""
        return self.ids and self.logprobs and self.reasoning

    @property
    def every_chunk(self) -> bool:
        """Whether the chunks of a stream can be passed on as they are."""
        return self.everything and self.usage and self.running_usage
