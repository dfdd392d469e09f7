"""Creates the services that both ways to run share: wiring only."""

from collections.abc import Callable

from proxy.fleet.fleet import Fleet
from proxy.fleet.membership import Membership, Resolve, fleet_id
from proxy.fleet.replica import Replica
from proxy.fleet.weight_calls import WeightCalls
from proxy.history.audit import Auditor
from proxy.history.encoders import EncoderPool
from proxy.history.history import History
from proxy.history.images import ImageLoader
from proxy.history.store import Limits
from proxy.image_fetch import ImageFetcher
from proxy.metrics import Metrics
from proxy.monitoring.store import timed_store
from proxy.settings import Settings, proof_folder
from proxy.stores.fleet_words import StoredWords
from proxy.stores.guarded import GuardedStore
from proxy.stores.urls import make_store
from proxy.turn.model_aliases import ModelAliases, parse_alias
from proxy.turn.running import RunningRequests
from proxy.turn.services import Services


def make_services(
    settings: Settings,
    fleet: Fleet,
    encoders: EncoderPool,
    metrics: Metrics,
    running: RunningRequests | None = None,
) -> Services:
    """Create the services of one application. Open their history before the first request."""
    limits = Limits(max_bytes=settings.store_max_bytes, max_age_s=settings.store_max_age_s)
    auditor = Auditor(metrics, proof_folder())
    store = timed_store(make_store(settings.store, limits), metrics)
    guarded = GuardedStore(store, metrics, required=settings.store_required)
    fetch = ImageFetcher(settings.image_hosts).fetch if settings.image_hosts else None
    images = ImageLoader(encoders, fetch=fetch)
    shared = settings.store != "memory:"
    fleet.weights.words = StoredWords(guarded, f"{_fleet_of(settings)}/weights", shared=shared)
    return Services(
        fleet,
        guarded,
        History(
            guarded,
            encoders,
            metrics,
            settings.cache_bytes,
            auditor,
            settings.overflow,
            settings.finish_after_s,
            images,
            settings.thinking_policy,
        ),
        WeightCalls(fleet, metrics, salted=settings.cache_salt_by_version),
        encoders,
        settings.body_limit_bytes,
        store_timeout_s=settings.store_timeout_s,
        cache_salt_by_version=settings.cache_salt_by_version,
        model_aliases=ModelAliases([parse_alias(alias) for alias in settings.model_aliases]),
        session_from_key=settings.session_from_key,
        running=running or RunningRequests(),
    )


def make_membership(
    settings: Settings, services: Services, make_replica: Callable[[str], Replica], resolve: Resolve
) -> Membership:
    """The membership of the services' fleet. It is to be started once the store is open.

    Args:
        resolve: finds the engines that a name among the upstreams stands for.
    """
    return Membership(
        services.fleet,
        make_replica,
        StoredWords(services.store, _fleet_of(settings)),
        settings.upstreams,
        settings.upstreams_file,
        settings.watch_interval_s,
        resolve,
    )


def _fleet_of(settings: Settings) -> str:
    """The name under which processes of one fleet share what changes while they run."""
    return fleet_id(settings.upstreams, settings.upstreams_file)
