"""The one model that a fleet serves, and how a replica differs from it.

A prompt is planned for the fleet's model, whatever replica runs it. So all that gives ids their meaning,
renders messages or limits a plan is equal on all replicas that get requests; any other replica is not ready.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from chat_tokenizer import ChatTokenizer
from tokenproxy.base.errors import Unsupported
from tokenproxy.base.images import Image
from tokenproxy.engine.discovery import Capabilities

if TYPE_CHECKING:
    from tokenproxy.fleet.fleet import Fleet
    from tokenproxy.fleet.replica import Replica


@dataclass(frozen=True, slots=True)
class FleetModel:
    """The model of all replicas that get requests."""

    capabilities: Capabilities
    """Those of the first replica."""
    tokenizer: ChatTokenizer | None
    """That of the first replica whose engine was found to render the same ids; None if there is none yet."""
    tokenizer_problem: Unsupported | None
    """Why there is no tokenizer."""

    def __str__(self) -> str:
        """For log messages."""
        return ", ".join(f"{name} {fact}" for name, fact in _facts(self.capabilities).items())

    def require_tokenizer(self) -> ChatTokenizer:
        """The tokenizer. Raises Unsupported if there is none; the message names what to set."""
        if self.tokenizer is None:
            assert self.tokenizer_problem is not None  # a replica has the one or the other
            raise self.tokenizer_problem
        return self.tokenizer

    def difference(self, replica: "Replica") -> str:
        """How a replica that responds differs from the model; empty if it does not."""
        wanted, facts = _facts(self.capabilities), _facts(replica.require_capabilities())
        found = [
            f"its {name} is {facts[name]}, not {wanted[name]}"
            for name in facts
            if facts[name] != wanted[name]
        ]
        if self.tokenizer is not None:
            if replica.tokenizer is None:
                found.append(f"its rendering is not verified: {replica.tokenizer_problem}")
            elif replica.tokenizer.fingerprint != self.tokenizer.fingerprint:
                found.append("it renders with another tokenizer or chat template")
        if not found:
            return ""
        return f"{replica.name} differs from the model that the fleet serves: {'; '.join(found)}"


def choose_model(current: FleetModel | None, replicas: Sequence["Replica"]) -> FleetModel | None:
    """The model that a fleet serves from now on.

    It stays until no replica with it is left; then it is the one that most replicas have, at a tie that of
    the first. If no tokenizer was found for it yet, it gets the one of the first replica that has one.

    Args:
        current: the one until now; None for a new decision.
        replicas: those that respond and are not drained, in the order of the fleet.
    """
    if replicas and (current is None or all(map(current.difference, replicas))):
        facts = [tuple(_facts(replica.require_capabilities()).values()) for replica in replicas]
        first = replicas[facts.index(Counter(facts).most_common(1)[0][0])]
        current = FleetModel(first.require_capabilities(), first.tokenizer, first.tokenizer_problem)
    if current is None or current.tokenizer is not None:
        return current
    alike = [replica for replica in replicas if not current.difference(replica)]
    tokenizer = next((replica.tokenizer for replica in alike if replica.tokenizer is not None), None)
    return current if tokenizer is None else replace(current, tokenizer=tokenizer, tokenizer_problem=None)


@dataclass(slots=True)
class FleetImages:
    """The images of a fleet's model: any replica tells the ids of an image."""

    fleet: "Fleet"
    placeholder: int
    """The id that stands for an image before it is expanded."""

    async def ids_of(self, image: Image) -> Sequence[int]:
        """See `EngineImages.ids_of`."""
        return await self.fleet.ask(
            lambda replica: replica.require_capabilities().require_images().ids_of(image)
        )


def _facts(capabilities: Capabilities) -> dict[str, str]:
    """What must be equal on all replicas, besides the tokenizer and chat template, by its name."""
    model, images = capabilities.model, capabilities.images
    return {
        "model": repr(model.name) if model else "unknown",
        "context length": str(model.max_model_len) if model else "unknown",
        "route for prompt ids": capabilities.token_in.name if capabilities.token_in else "none",
        "list of rendered fields": ", ".join(sorted(capabilities.rendered_fields)) or "empty",
        "logprobs mode": capabilities.logprobs_mode or "unknown",
        "placeholder of images": str(images.placeholder) if images else "none",
        "number of ids for a small image": str(images.probe_count) if images else "none",
    }
