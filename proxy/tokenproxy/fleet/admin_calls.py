"""The engine's routes that change or describe all replicas at once: one table, with a rule for each route.

A call is sent to all replicas at the same moment and never repeated. docs/weights.md has the same table.
"""

from dataclasses import dataclass
from enum import StrEnum


class Effect(StrEnum):
    """What a call changes, as far as the proxy has to know."""

    NONE = "none"
    PAUSE = "pause"
    """New requests wait from now on."""
    RESUME = "resume"
    """The waiting requests are sent."""
    SLEEP = "sleep"
    """As a pause; the caches are cleared."""
    WAKE = "wake"
    """Ends the sleep if all memory is back."""
    JOIN = "join"
    """The replicas join the trainer's group of processes, each with its own `rank_offset`."""
    LEAVE = "leave"
    """The replicas leave that group."""
    START = "start"
    """A weight update starts. New requests wait."""
    LOAD = "load"
    """Weights are loaded."""
    FINISH = "finish"
    """The update ends, and its version gets a name."""
    NAME = "name"
    """The version of the weights gets a name."""
    CALL = "call"
    """Anything: a method of the workers, which may load weights."""
    CLEAR = "clear"
    """The prefix cache is cleared."""
    ADD_ADAPTER = "add_adapter"


class Join(StrEnum):
    """How the answers of the replicas become one."""

    EQUAL = "equal"
    """The answer that all replicas gave; each replica's own if they differ."""
    SUM = "sum"
    """The sum of a number."""
    CONCATENATE = "concatenate"
    """The lists one after the other, in the order of the replicas."""
    SUCCESS = "success"
    """As `EQUAL`; an answer with `"success": false` is a failure of its replica."""


@dataclass(frozen=True, slots=True)
class AdminCall:
    """The rule of one route."""

    method: str
    path: str
    summary: str
    effect: Effect = Effect.NONE
    join: Join = Join.EQUAL
    field: str = ""
    """The field of the answer that `SUM` and `CONCATENATE` are about."""
    leaves: bool = False
    """Whether a replica on which it fails leaves service, because it differs from the others from now on."""


_GET, _POST = "GET", "POST"

ADMIN_CALLS = (
    AdminCall(_POST, "/pause", "Pause all replicas", Effect.PAUSE),
    AdminCall(_POST, "/resume", "Resume all replicas", Effect.RESUME, leaves=True),
    AdminCall(_GET, "/is_paused", "Whether the replicas are paused"),
    AdminCall(_POST, "/abort_requests", "Abort running requests", join=Join.SUM, field="aborted"),
    AdminCall(_POST, "/init_weight_transfer_engine", "Join the trainer's process group", Effect.JOIN),
    AdminCall(_POST, "/shutdown_weight_transfer_engine", "Leave the trainer's process group", Effect.LEAVE),
    AdminCall(_POST, "/start_weight_update", "Begin a weight update", Effect.START, leaves=True),
    AdminCall(_POST, "/start_draft_weight_update", "Begin one of the draft model", Effect.START, leaves=True),
    AdminCall(_POST, "/update_weights", "Load weights", Effect.LOAD, leaves=True),
    AdminCall(_POST, "/finish_weight_update", "End a weight update", Effect.FINISH, leaves=True),
    AdminCall(_POST, "/update_weight_version", "Name the version", Effect.NAME, leaves=True),
    AdminCall(_GET, "/weight_info", "The version of the weights"),
    AdminCall(_POST, "/weight_checker", "Checksums of the weights"),
    AdminCall(_GET, "/get_world_size", "Workers of all replicas", join=Join.SUM, field="world_size"),
    AdminCall(_POST, "/reset_prefix_cache", "Clear the prefix caches", Effect.CLEAR, Join.SUCCESS),
    AdminCall(_POST, "/reset_mm_cache", "Clear the caches of media"),
    AdminCall(_POST, "/reset_encoder_cache", "Clear the caches of encoders"),
    AdminCall(_POST, "/sleep", "Put all replicas to sleep", Effect.SLEEP),
    AdminCall(_POST, "/wake_up", "Wake all replicas up", Effect.WAKE, leaves=True),
    AdminCall(_GET, "/is_sleeping", "Whether the replicas sleep"),
    AdminCall(_POST, "/release_kv_cache_memory", "Free the memory of the KV caches", Effect.CLEAR),
    AdminCall(
        *(_POST, "/collective_rpc", "Call a method of all workers", Effect.CALL, Join.CONCATENATE),
        field="results",
        leaves=True,
    ),
    AdminCall(_POST, "/v1/load_lora_adapter", "Load an adapter on all replicas", Effect.ADD_ADAPTER),
    AdminCall(_POST, "/v1/unload_lora_adapter", "Unload an adapter from all replicas"),
)
