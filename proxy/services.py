"""What both ways to run put together from the settings: wiring only."""

from concurrent.futures import ThreadPoolExecutor

from proxy.fleet.fleet import Fleet
from proxy.history.audit import Auditor
from proxy.history.history import History
from proxy.history.store import Limits
from proxy.metrics import Metrics
from proxy.settings import Settings
from proxy.stores.urls import make_store
from proxy.turn.services import Services


def make_services(
    settings: Settings, fleet: Fleet, encoders: ThreadPoolExecutor, metrics: Metrics
) -> Services:
    """The services of one application. Their history is to be opened before the first request."""
    limits = Limits(max_bytes=settings.store_max_bytes, max_age_s=settings.store_max_age_s)
    auditor = Auditor(metrics, settings.audit_share, settings.proof_folder)
    store = make_store(settings.store, limits)
    return Services(
        fleet,
        History(store, encoders, metrics, settings.cache_bytes, auditor),
        encoders,
        settings.body_limit_bytes,
        settings.record_logprobs,
        settings.record_token_route,
    )
