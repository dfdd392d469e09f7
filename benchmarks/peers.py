"""The gateways that `gateway` and `fleet` compare with: how each is started in front of engines.

Each runs as its documentation starts it, with one process, on one core, without API keys, and with the policy
that costs least where there is one engine to choose. All but rllm-model-gateway only forward. That one
records, in SQLite, the requests of a session, which its clients name in the path.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.client import MODEL
from benchmarks.processes import ROOT, Running, StartError, free_ports, gateway


@dataclass(frozen=True, slots=True)
class Peer:
    """A gateway. In its arguments {engine} is a URL, {port} and {metrics} are free ports, {folder} is its."""

    name: str
    """Also of the folder in .cache in which `scripts/install-peers` installs it."""
    version: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Files in {folder}, by name."""
    prefix: str = ""
    """Of the paths of requests."""

    @property
    def title(self) -> str:
        """The name of its row."""
        return f"{self.name} {self.version}"


_LITELLM_CONFIG = f"""\
model_list:
  - model_name: {MODEL}
    litellm_params:
      model: hosted_vllm/{MODEL}
      api_base: {{engine}}/v1
      api_key: none
"""
_LISTEN = ("--host", "127.0.0.1", "--port", "{port}")
_QUIET = ("--prometheus-port", "{metrics}", "--worker-startup-check-interval", "1", "--log-level", "warning")
_ROUTE = ("--worker-urls", "{engine}", "--policy", "round_robin")
ROUTER = Peer("vllm-router", "0.1.17", (*_LISTEN, *_ROUTE, *_QUIET))
RLLM = Peer(
    "rllm-model-gateway",
    "0.1.0",
    (*_LISTEN, "--worker", "{engine}", "--db-path", "{folder}/traces.db", "--log-level", "warning"),
    prefix="/sessions/bench",
)
PEERS = (
    ROUTER,
    Peer(
        "smg",
        "1.13.0",
        ("launch", *_LISTEN, *_ROUTE, "--prometheus-port", "{metrics}", "--log-level", "warn"),
    ),
    RLLM,
    Peer(
        "litellm",
        "1.106.0",
        (*_LISTEN, "--config", "{folder}/litellm.yaml"),
        environment={
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it fetches prices from the internet
            "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
            "LITELLM_LOG": "ERROR",
        },
        files={"litellm.yaml": _LITELLM_CONFIG},
    ),
)


def router_for_fleet(policy: str, ports: Sequence[int]) -> Peer:
    """vllm-router with a policy and many engines."""
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    return Peer("vllm-router", "0.1.17", (*_LISTEN, "--worker-urls", *urls, "--policy", policy, *_QUIET))


@contextmanager
def run_peer(peer: Peer, core: int, engine_port: int, folder: Path) -> Iterator[Running]:
    """Run a gateway in front of the engine.

    Raises:
        StartError: it is not installed, or does not start.
    """
    program = ROOT / ".cache" / peer.name / "bin" / peer.name
    if not program.exists():
        raise StartError(f"not installed: run scripts/install-peers {peer.name}")
    port, metrics = free_ports(2)
    files = folder / peer.name
    files.mkdir(exist_ok=True)
    values = {"engine": f"http://127.0.0.1:{engine_port}", "folder": str(files)}
    for name, text in peer.files.items():
        (files / name).write_text(text.format(**values))
    arguments = [argument.format(port=port, metrics=metrics, **values) for argument in peer.arguments]
    with gateway([str(program), *arguments], core, port, files / "log", peer.environment) as running:
        yield running
