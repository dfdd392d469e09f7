"""Replicas that come and go while requests run."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.fleet.membership import MembershipError, normalise_upstream, resolve_host
from proxy.settings import Settings, SettingsError, load_settings
from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_app, run_proxy, wait_until

_CHAT, _ADMIN = "/v1/chat/completions", "/admin/replicas"
_HI = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def start(tiny_model: TinyModel) -> Iterator[Callable[..., FakeVllm]]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(FakeVllm(tiny_model))


def _ready(client: httpx.Client) -> list[str]:
    return [engine["engine"] for engine in client.get("/ready").json()["engines"] if engine["ready"]]


def _generations(engine: FakeVllm) -> int:
    return sum(seen.json.get("max_tokens") != 1 for seen in engine.seen(_CHAT))


def _state(client: httpx.Client, engine: FakeVllm) -> str:
    """The state of a replica by the metrics."""
    label = f'tokenproxy_replica_state{{replica="{engine.url}",state="'
    lines = client.get("/metrics").text.splitlines()
    [state] = [line.removeprefix(label) for line in lines if line.startswith(label) and line.endswith(" 1.0")]
    return state.partition('"')[0]


def _run(client: httpx.Client, count: int = 6) -> None:
    for _ in range(count):
        assert client.post(_CHAT, json=_HI).status_code == 200


def test_a_replica_is_added_and_removed(start: Callable[..., FakeVllm]) -> None:
    first, second = start(), start()
    with run_proxy([first], store="memory:", policy="round_robin") as client:
        _run(client)
        assert client.post(_ADMIN, json={"url": second.url + "/v1/"}).status_code == 200
        wait_until(lambda: _ready(client) == [first.url, second.url])
        _run(client)
        assert (_generations(first), _generations(second)) == (9, 3)
        assert client.delete(_ADMIN, params={"url": first.url}).status_code == 200
        _run(client)
        assert (_generations(first), _generations(second)) == (9, 9)
        assert [replica["engine"] for replica in client.get(_ADMIN).json()["replicas"]] == [second.url]


def test_a_removed_replica_finishes_its_streams(start: Callable[..., FakeVllm]) -> None:
    first, second = start(), start()
    with run_proxy([first, second], store="memory:", policy="round_robin") as client:
        first.replies.append(Reply(hold_at=1))
        with client.stream("POST", _CHAT, json={**_HI, "stream": True}) as response:
            chunks = response.iter_raw()
            received = next(chunks)
            client.delete(_ADMIN, params={"url": first.url})
            first.release()
            received += b"".join(chunks)
        assert received.endswith(b"data: [DONE]\n\n")


def test_a_drained_replica_gets_nothing_until_it_is_added_again(start: Callable[..., FakeVllm]) -> None:
    first, second = start(), start()
    with run_proxy([first, second], store="memory:", policy="round_robin") as client:
        drained = client.post(f"{_ADMIN}/drain", json={"url": first.url}).json()["replicas"][0]
        assert (drained["draining"], drained["requests"]) == (True, 0)
        assert _state(client, first) == "draining"
        _run(client)
        assert (_generations(first), _generations(second)) == (0, 6)
        client.post(_ADMIN, json={"url": first.url})
        _run(client)
        assert _generations(first) == 3
        assert _state(client, first) == "ready"


@pytest.mark.parametrize(
    "send, status",
    [
        (lambda client: client.post(_ADMIN, json={}), 400),
        (lambda client: client.post(_ADMIN, json={"url": 5}), 400),
        (lambda client: client.post(_ADMIN, json={"url": "ftp://a"}), 400),
        (lambda client: client.post(_ADMIN, content=b"{"), 400),
        (lambda client: client.delete(_ADMIN, params={"url": "nonsense"}), 400),
        (lambda client: client.delete(_ADMIN, params={"url": "http://127.0.0.1:1"}), 404),
        (lambda client: client.post(f"{_ADMIN}/drain", json={"url": "http://127.0.0.1:1"}), 404),
    ],
)
def test_wrong_requests_change_nothing(
    start: Callable[..., FakeVllm], send: Callable[[httpx.Client], httpx.Response], status: int
) -> None:
    with run_proxy([start()], store="memory:") as client:
        assert send(client).status_code == status
        assert len(client.get(_ADMIN).json()["replicas"]) == 1


def test_a_file_is_read_again_when_it_changes(
    start: Callable[..., FakeVllm], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = start(), start()
    file = tmp_path / "engines.txt"
    file.write_text(f"# the fleet\n{first.url}\n")
    with run_app(Settings(upstreams_file=file, watch_interval_s=0.05)) as client:
        wait_until(lambda: _ready(client) == [first.url])
        file.write_text(f"{first.url}\n\n{second.url}/v1  # new\n")
        wait_until(lambda: _ready(client) == [first.url, second.url])
        file.write_text("nonsense\n")
        file.with_suffix(".other").write_text(second.url)
        wait_until(lambda: "stay as they were" in caplog.text)
        assert len(_ready(client)) == 2, "a file that cannot be read changes nothing"
        file.with_suffix(".other").replace(file)
        wait_until(lambda: _ready(client) == [second.url])


def test_changes_do_not_disturb_running_requests(start: Callable[..., FakeVllm], tmp_path: Path) -> None:
    stays, comes = start(), start()
    failures: list[Any] = []
    with run_proxy([stays], store="memory:") as client:
        over = threading.Event()

        def ask() -> None:
            while not over.is_set():
                response = client.post(_CHAT, json=_HI)
                if response.status_code != 200:
                    failures.append(response.text)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(5):
            client.post(_ADMIN, json={"url": comes.url})
            wait_until(lambda: len(_ready(client)) == 2)
            client.delete(_ADMIN, params={"url": comes.url})
        over.set()
        for thread in threads:
            thread.join()
    assert failures == []


async def test_a_name_stands_for_its_addresses() -> None:
    assert "http://127.0.0.1:8000" in await resolve_host("dns+http://localhost:8000")
    with pytest.raises(MembershipError, match=r"no-such-name\.invalid"):
        await resolve_host("dns+http://no-such-name.invalid:8000")


def test_a_name_is_resolved_again(
    start: Callable[..., FakeVllm], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = start(), start()
    addresses = [first.url]

    async def resolve(url: str) -> list[str]:
        if not addresses:
            raise MembershipError("the name server is down")
        return list(addresses)

    monkeypatch.setattr("proxy.app.resolve_host", resolve)
    with run_app(Settings(upstreams=["dns+http://engines:8000"], watch_interval_s=0.05)) as client:
        wait_until(lambda: _ready(client) == [first.url])
        addresses.append(second.url)
        wait_until(lambda: _ready(client) == [first.url, second.url])
        addresses.clear()
        wait_until(lambda: "the name server is down" in caplog.text)
        assert len(_ready(client)) == 2
        addresses.append(second.url)
        wait_until(lambda: _ready(client) == [second.url])


@pytest.mark.parametrize(
    "url, normal",
    [
        ("dns+http://engines:8000/v1", "dns+http://engines:8000"),
        ("http://a:1/", "http://a:1"),
    ],
)
def test_urls_are_normalised(url: str, normal: str) -> None:
    assert normalise_upstream(url) == normal


def test_a_wrong_file_is_a_wrong_setting(tmp_path: Path) -> None:
    file = tmp_path / "engines.txt"
    with pytest.raises(SettingsError, match="upstreams_file"):
        load_settings(upstreams_file=file)
    file.write_text("http://a:1\nb:2\n")
    with pytest.raises(SettingsError, match=r"engines\.txt.*b:2"):
        load_settings(upstreams_file=file)


def test_a_new_password_in_the_file_is_used(start: Callable[..., FakeVllm], tmp_path: Path) -> None:
    engine, file = start(), tmp_path / "engines.txt"

    def passwords() -> set[bytes]:
        headers = [header for seen in engine.seen(_CHAT) for header in seen.headers]
        return {value for name, value in headers if name == b"authorization"}

    file.write_text(engine.url.replace("http://", "http://user:one@"))
    with run_app(Settings(upstreams_file=file, watch_interval_s=0.05)) as client:
        wait_until(lambda: _ready(client) == [engine.url])
        _run(client, 1)
        first = passwords()
        file.write_text(engine.url.replace("http://", "http://user:two@"))
        wait_until(lambda: client.post(_CHAT, json=_HI).status_code == 200 and passwords() > first)
        assert len(first) == 1
