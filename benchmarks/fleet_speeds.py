"""The fleet of the benchmark: eight engines, of which three are slow; about 14 times faster than real."""

from benchmarks.fleet_model import Speed

FAST = Speed(
    prefill_per_s=112_000, decode_per_s=14_000, half=16, during_prefill=0.15, running=32, capacity_ids=160_000
)
"""With 16 sequences each samples 440 ids/s."""
SLOW_FACTOR = 3.0
REPLICAS, SLOW = 8, 3
CONNECTIONS = 128
"""Conversations at the same time."""


def fleet_speeds(fast: Speed = FAST, replicas: int = REPLICAS, slow: int = SLOW) -> list[Speed]:
    """The speeds of a fleet; the slow replicas are spread over it."""
    at = {round(number * replicas / slow) for number in range(slow)} if slow else set()
    return [fast.slower(SLOW_FACTOR) if number in at else fast for number in range(replicas)]
