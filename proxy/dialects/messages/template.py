"""The facts about a fleet's chat template and context by which a request is converted."""

from dataclasses import dataclass

from proxy.turn.services import Services
from tokenization import ChatTokenizer


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What the conversion of a request depends on. The defaults are vLLM's for an unknown template."""

    merges_system: bool = True
    """Whether the template takes system messages at the start only."""
    effort_without_thinking: str = "none"
    """The reasoning effort for disabled thinking: `low` for templates that do not know `none`."""
    max_model_len: int | None = None
    """The model's context, in ids."""


class FleetTemplate:
    """The facts about the template of a fleet, whose replicas serve one model. Read once per tokenizer."""

    def __init__(self) -> None:
        self._tokenizer: ChatTokenizer | None = None
        self._facts = TemplateFacts()

    async def facts(self, services: Services) -> TemplateFacts:
        """The facts about the template of the model that the fleet serves.

        Raises:
            EngineUnavailable: no replica responds.
        """
        served = await services.fleet.served_model()
        model, tokenizer = served.capabilities.model, served.tokenizer
        length = model.max_model_len if model else None
        if tokenizer is None:
            return TemplateFacts(max_model_len=length)
        if tokenizer is not self._tokenizer or length != self._facts.max_model_len:
            self._facts = await services.in_thread(lambda: _facts(tokenizer, length))
            self._tokenizer = tokenizer
        return self._facts


def _facts(tokenizer: ChatTokenizer, max_model_len: int | None) -> TemplateFacts:
    return TemplateFacts(tokenizer.merges_system, tokenizer.effort_without_thinking, max_model_len)
