"""What both ways to run put together from the settings: wiring only."""

from concurrent.futures import ThreadPoolExecutor

from proxy.dialects.base import Gateway
from proxy.fleet.fleet import Fleet
from proxy.metrics import Metrics
from proxy.rollout.retries import Retries
from proxy.rollout.rollouts import Rollouts
from proxy.rollout.store import Limits
from proxy.rollout.stores import make_store
from proxy.settings import Settings


def make_gateway(settings: Settings, fleet: Fleet, encoders: ThreadPoolExecutor, metrics: Metrics) -> Gateway:
    """What the dialects work with. Its rollouts are to be opened before the first request."""
    limits = Limits(max_bytes=settings.store_max_bytes, max_age_s=settings.store_max_age_s)
    store = make_store(settings.store, limits)
    return Gateway(
        fleet,
        encoders,
        settings.body_limit_bytes,
        Rollouts(store, encoders, metrics),
        Retries(store),
        settings.record_logprobs,
    )
