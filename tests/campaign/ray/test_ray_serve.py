"""The proxy as an application of Ray Serve, with a real cluster, Redis, engine and plain clients."""

import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from os import kill
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.acceptance.conftest import Server, running
from tests.campaign.ray.cluster import Cluster, run_cluster
from tests.campaign.real_vllm.conftest import wait_ready
from tests.support.redis_server import run_redis
from tests.support.sockets import connect, head, until_closed
from tests.support.talk import CHAT, Answered, Conversation, user
from tests.support.utils import wait_until

pytest.importorskip("ray", reason="scripts/install-programs ray installs it")
# a cluster starts processes that import a lot, and Ray gives its own a low priority
pytestmark = pytest.mark.timeout(900)

_ROOT = Path(__file__).parents[3]
_CONVERSATIONS, _TURNS, _IDS = 16, 6, 8
_PROXY = "ServeReplica:default:Proxy"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    try:
        with run_cluster(folder) as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with run_redis(tmp_path_factory.mktemp("redis")) as port:
        yield f"redis://127.0.0.1:{port}/0"


@pytest.fixture
def arguments(servers: Mapping[str, Server], store: str) -> dict[str, Any]:
    """The arguments of deploy/ray/serve.yaml, with engine, store and number of replicas of the test."""
    [application] = yaml.safe_load((_ROOT / "deploy/ray/serve.yaml").read_text())["applications"]
    here = {"upstreams": [servers["in front"].engine.url], "store": store, "store_timeout_s": 30, "cpus": 0.1}
    settings: dict[str, Any] = application["args"] | here
    del settings["max_replicas"]
    return settings


class _Conversation(Conversation):
    """A conversation of a plain client."""

    def __init__(self, cluster: Cluster, name: str, **headers: str) -> None:
        client = httpx.Client(base_url=cluster.url, timeout=120)
        super().__init__(client, [], {"model": "smollm2", "max_tokens": _IDS}, headers)
        self.name = name
        self.answers: list[Answered] = []

    def turn(self) -> None:
        """One turn, whose prompt begins with all ids of the one before."""
        answer = self.ask(user(f"{self.name}: tell me more."))
        assert not self.answers or answer.continues(self.answers[-1])
        self.answers.append(answer)

    @property
    def requests(self) -> list[str]:
        """The ids of its requests."""
        return [answer.response.headers["x-request-id"] for answer in self.answers]

    @property
    def sessions(self) -> set[str]:
        """The sessions that its turns are in."""
        return {answer.session for answer in self.answers}


def _all(conversations: list[_Conversation], turns: int) -> None:
    with ThreadPoolExecutor(len(conversations)) as pool:
        for _ in range(turns):
            list(pool.map(_Conversation.turn, conversations))


def test_a_replica_is_killed_between_turns(cluster: Cluster, arguments: dict[str, Any]) -> None:
    cluster.run({"args": arguments})
    wait_ready(cluster.url)
    conversations = [_Conversation(cluster, f"boat {number}") for number in range(_CONVERSATIONS)]
    _all(conversations, _TURNS // 2)
    before = cluster.processes(_PROXY)
    assert len(before) == 2
    kill(before[0], signal.SIGKILL)
    _all(conversations, _TURNS - _TURNS // 2)

    both = 0
    for each in conversations:
        [session] = each.sessions
        [sample] = httpx.get(f"{cluster.url}/v1/sessions/{session}/samples", timeout=60).json()["samples"]
        assert len(sample["turns"]) == _TURNS
        last = each.answers[-1]
        assert sample["prompt_ids"] + sample["completion_ids"] == last.prompt_ids + last.ids
        both += len(set(cluster.replicas_of(each.requests[: _TURNS // 2]))) == 2
    assert both >= _CONVERSATIONS // 4  # a turn goes to either at random: 3 of 4 conversations are expected
    wait_until(lambda: len(cluster.processes(_PROXY)) == 2, 120)


def test_a_session_stays_on_one_replica(cluster: Cluster, arguments: dict[str, Any]) -> None:
    cluster.run({"args": arguments})
    wait_ready(cluster.url)
    named = [
        _Conversation(cluster, f"tree {number}", **{"X-Session-ID": f"sticky-{number}"})
        for number in range(_CONVERSATIONS)  # all on one replica by chance: less than once in 10,000 runs
    ]
    _all(named, 3)
    assert [len(set(cluster.replicas_of(each.requests))) for each in named] == [1] * _CONVERSATIONS
    assert len({*cluster.replicas_of([each.requests[0] for each in named])}) == 2
    assert [each.sessions for each in named] == [{f"sticky-{number}"} for number in range(_CONVERSATIONS)]


def test_a_client_leaves(cluster: Cluster, arguments: dict[str, Any], servers: Mapping[str, Server]) -> None:
    cluster.run({"args": arguments})
    wait_ready(cluster.url)
    body = {"messages": [user("Count.")], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    arrived: list[float] = []
    headers = {"X-Session-ID": "leaves"}
    with httpx.stream("POST", cluster.url + CHAT, json=body, headers=headers, timeout=60) as answer:
        for line in answer.iter_lines():
            arrived += [time.monotonic()] * line.startswith("data: ")
            if len(arrived) > 10:
                break
    assert arrived[-1] - arrived[1] > 0.05  # they came one by one
    wait_until(lambda: running(servers["in front"].engine) == 0, 20)
    samples = f"{cluster.url}/v1/sessions/leaves/samples"
    wait_until(lambda: httpx.get(samples, timeout=30).status_code == 200, 20)
    [sample] = httpx.get(samples, timeout=30).json()["samples"]
    assert sample["turns"][0]["finish_reason"] == "abort"
    assert 8 < len(sample["completion_ids"]) < 1000


def test_engines_that_ray_serve_runs(cluster: Cluster, model: Path, store: str) -> None:
    flags = "--served-model-name smollm2 --dtype float32 --enforce-eager --max-model-len 8192"
    environment = {
        **{"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
        **{"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"},
    }
    engine = {
        **{"model": str(model), "gpus": 0, "cpus": 1, "environment": environment},
        "flags": f"{flags} --gpu-memory-utilization 0.3",
    }
    proxy = {"store": store, "store_timeout_s": 30, "cpus": 0.1, "watch_interval_s": 0.5}
    arguments = {"engines": engine, **proxy}
    cluster.run({"args": arguments})
    wait_ready(cluster.url)
    conversation = _Conversation(cluster, "engine")
    _all([conversation], 3)
    [vllm] = [state["engine"] for state in httpx.get(f"{cluster.url}/ready").json()["engines"]]

    # it ends with its replica, however that ends, and another one takes its place
    [replica] = cluster.processes("ServeReplica:default:Engine")
    kill(replica, signal.SIGKILL)
    wait_until(lambda: not _answers(vllm), 60)
    wait_until(lambda: _engines(cluster) not in ([], [vllm]), 240)
    wait_ready(cluster.url)
    _all([conversation], 2)
    [second] = _engines(cluster)
    cluster.run({"args": arguments | {"engines": None, "upstreams": [second]}})
    wait_until(lambda: not _answers(second), 120)


def _engines(cluster: Cluster) -> list[str]:
    engines = httpx.get(f"{cluster.url}/ready", timeout=30).json()["engines"]
    return [engine["engine"] for engine in engines if engine["ready"]]


def _answers(engine: str) -> bool:
    try:
        return httpx.get(f"{engine}/health", timeout=5).is_success
    except httpx.TransportError:
        return False


_ACTOR = """
import sys
import ray


class Server:
    def __init__(self, host, port):
        self.address = host, port

    def get_server_address(self):
        return self.address


ray.init(log_to_driver=False)
options = {"name": "rollout_server_0", "lifetime": "detached", "num_cpus": 0}
server = ray.remote(Server).options(**options).remote(sys.argv[1], int(sys.argv[2]))
print(ray.get(server.get_server_address.remote()))
"""


def test_engines_that_are_found_by_name(
    cluster: Cluster, arguments: dict[str, Any], servers: Mapping[str, Server]
) -> None:
    """As trainers name their own servers."""
    host, _, port = servers["in front"].engine.url.removeprefix("http://").partition(":")
    cluster.command("python", "-c", _ACTOR, host, port)
    upstreams = ["ray-actor://rollout_server_/get_server_address"]
    cluster.run({"args": arguments | {"upstreams": upstreams, "watch_interval_s": 0.5}})
    wait_ready(cluster.url)
    wait_until(lambda: _engines(cluster) == [servers["in front"].engine.url], 60)
    conversation = _Conversation(cluster, "named")
    _all([conversation], 2)
    [actor] = cluster.processes("Server")
    kill(actor, signal.SIGKILL)
    wait_until(lambda: not httpx.get(f"{cluster.url}/ready", timeout=30).json()["engines"], 60)


def test_the_body_of_an_upgrade_is_no_second_request(cluster: Cluster, arguments: dict[str, Any]) -> None:
    """Ray Serve's server reads no body after the head of an upgrade."""
    cluster.run({"args": arguments})
    wait_ready(cluster.url)
    hidden = b"GET /v1/sessions HTTP/1.1\r\nhost: localhost\r\n\r\n"
    body = b"\r\n" * 200_000 + hidden
    with connect(httpx.URL(cluster.url)) as balancer:
        lines = "connection: keep-alive, upgrade", "upgrade: h2c", f"content-length: {len(body)}"
        balancer.sendall(head(CHAT, *lines) + body)
        answers = until_closed(balancer)
    assert answers.startswith(b"HTTP/1.1 400 ") and answers.count(b"HTTP/1.1 ") == 1
    assert b'"param":"upgrade"' in answers
