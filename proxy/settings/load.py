"""Settings of the limits under load."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from proxy.settings.flags import Flag
from proxy.turn.request import ThinkingPolicy


class LoadSettings(BaseModel):
    """Limits of running and waiting requests, and what happens beyond them."""

    replica_requests: int = Field(
        default=2048, ge=0, description="requests that may run on one replica at once; 0 for no limit"
    )
    replica_ids: int = Field(
        default=0, ge=0, description="prompt ids that may run on one replica at once; 0 for no limit"
    )
    queue_requests: int = Field(
        default=16384, ge=0, description="requests that may wait for a replica; beyond them a 429"
    )
    queue_timeout_s: float = Field(
        default=600.0, gt=0, description="seconds that a request may wait for a replica; then a 429"
    )
    encoder_bytes: Annotated[int, Flag(default="256 MiB")] = Field(
        default=256 * 2**20,
        ge=1,
        description="bytes of messages that may be tokenised and parsed, or wait for it; beyond them a 429",
    )
    thinking_policy: ThinkingPolicy = Field(
        default=ThinkingPolicy.KEEP,
        description="`keep` leaves the sampled thinking of earlier turns in prompts, `template` renders a "
        "prompt anew where the chat template leaves some of it out; requests and sessions may set it too",
    )
    overflow: Literal["error", "render"] = Field(
        default="error",
        description="what happens to a conversation whose ids outgrow the model's context: an error, or the "
        "chat template renders it anew, which may drop thinking and starts a new branch",
    )
