"""Creates the services that both ways to run share, and checks the settings of those in front of vLLM."""

from collections.abc import Callable

from tokenproxy.base.image_fetch import ImageFetcher
from tokenproxy.base.urls import url_credentials
from tokenproxy.fleet.fleet import Fleet
from tokenproxy.fleet.membership import fleet_id
from tokenproxy.fleet.weight_calls import WeightCalls
from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.record.audit import Auditor
from tokenproxy.record.encoders import EncoderPool
from tokenproxy.record.history import History
from tokenproxy.record.images import ImageLoader
from tokenproxy.record.store import Limits
from tokenproxy.settings import Settings, SettingsError
from tokenproxy.settings.groups import proof_folder
from tokenproxy.store.fleet_words import StoredWords
from tokenproxy.store.guarded import GuardedStore
from tokenproxy.store.urls import make_store
from tokenproxy.turn.model_aliases import ModelAliases, parse_alias
from tokenproxy.turn.running import RunningRequests
from tokenproxy.turn.services import Services
from tokenproxy.web.auth import is_loopback
from tokenproxy.web.key_file import read_keys


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
    store = make_store(settings.store, limits)
    guarded = GuardedStore(store, metrics, required=settings.store_required)
    fetch = ImageFetcher(settings.image_hosts).fetch if settings.image_hosts else None
    images = ImageLoader(encoders, fetch=fetch)
    shared = settings.store != "memory:"
    fleet.weights.words = StoredWords(guarded, f"{fleet_of(settings)}/weights", shared=shared)
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


def fleet_of(settings: Settings) -> str:
    """The name under which processes of one fleet share what changes while they run."""
    return fleet_id(settings.upstreams, settings.upstreams_file)


def lends_credentials(settings: Settings) -> bool:
    """Whether the proxy adds its own credentials to the requests that it sends to engines for clients."""
    return settings.upstream_api_key is not None or any(map(url_credentials, settings.upstreams))


def check_settings(settings: Settings, processes: int) -> None:
    """Refuse settings with which the proxy cannot or must not serve.

    Args:
        processes: how many serve together.

    Raises:
        SettingsError: a value cannot be used; every client that reaches the proxy could use the engine's key;
            or the turns would be kept in the memory of each process.
    """
    checks: dict[str, Callable[[], object]] = {
        "store": lambda: make_store(settings.store, Limits()),
        "model_aliases": lambda: [parse_alias(alias) for alias in settings.model_aliases],
        "api_key_file": lambda: settings.api_key_file and read_keys(settings.api_key_file),
    }
    for name, check in checks.items():
        try:
            check()
        except ValueError as error:
            raise SettingsError(f"{name}: {error}") from error
    lends = lends_credentials(settings) and not settings.asks_for_keys
    if lends and not settings.allow_anonymous and not is_loopback(settings.host):
        name = "`upstream_api_key`" if settings.upstream_api_key else "the user in an upstream's URL"
        raise SettingsError(
            f"every client that reaches host {settings.host} could use the engines with {name}: "
            "set `api_key` (--api-key KEY), listen on 127.0.0.1, or pass --allow-anonymous"
        )
    if processes > 1 and settings.store == "memory:":
        raise SettingsError(
            f"{processes} `workers` cannot share turns that `store: memory:` keeps in each process: "
            "set `store` to sqlite:///FILE or redis://HOST:PORT/DB, or pass --workers 1"
        )
