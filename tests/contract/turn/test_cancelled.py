"""A request that is cancelled at any await: what was sampled is recorded, and nothing is held."""

import asyncio
import json
import types
from collections.abc import AsyncIterator, Coroutine, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from tests.support.fake_vllm import FakeVllm, Reply, Variant, data_of
from tests.support.talk import CHAT, user
from tests.support.tiny_model import SPLIT, TinyModel
from tests.support.utils import until
from tokenproxy.app import app as application
from tokenproxy.app.app import create_app
from tokenproxy.settings import Settings
from tokenproxy.turn.services import Services

_HOST = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
_MOST_AWAITS = 200


@types.coroutine
def _cut(work: Coroutine[Any, Any, None], at: int, waits: list[int]) -> Generator[Any, Any, None]:
    """Run work, and cancel its task at the await of number `at`. Counts the awaits in `waits`."""
    error: BaseException | None = None
    while True:
        try:
            awaited = work.send(None) if error is None else work.throw(error)
        except StopIteration:
            return
        waits[0] += 1
        if waits[0] == at:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        error = None
        try:
            yield awaited
        except BaseException as raised:  # noqa: BLE001 - the work gets it
            error = raised


@dataclass
class _Proxy:
    """A proxy of this event loop, and its engine."""

    app: FastAPI
    services: Services
    fake: FakeVllm
    sent: list[Any] = field(default_factory=list)
    """The messages of the last response."""

    async def ask(self, method: str, path: str, body: Any = None, *, session: str = "", at: int = 0) -> bool:
        """Send a request. Returns whether it ended before the await at which it was to be cancelled."""
        self.sent, waits, gone = [], [0], asyncio.Event()
        parts = [{"type": "http.request", "body": json.dumps(body).encode() if body else b""}]
        named = [(b"x-session-id", session.encode())] if session else []
        scope = {
            **{
                "type": "http",
                "http_version": "1.1",
                "method": method,
                "path": path,
                "raw_path": path.encode(),
            },
            **{
                "headers": [*_HOST, *named],
                "query_string": b"",
                "client": ("127.0.0.1", 1),
                "scheme": "http",
            },
        }

        async def receive() -> Any:
            if parts:
                return parts.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            self.sent.append(message)

        async def run() -> None:
            await _cut(self.app(scope, receive, send), at, waits)

        task = asyncio.create_task(run())
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()
        return waits[0] < at

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    def holds_nothing(self) -> bool:
        """Whether no request holds anything: connections, places, rollouts, claims, keys."""
        history, fleet = self.services.history, self.services.fleet
        return not (
            history.pins.held
            or history.named
            or any(replica.load.running for replica in fleet.replicas)
            or fleet.queue.waiting
            or self.fake.running
        )


@pytest.fixture
def fake(tiny_model: TinyModel) -> Any:
    with FakeVllm(tiny_model, Variant.CHAT) as engine:
        yield engine


@asynccontextmanager
async def _proxy(fake: FakeVllm, folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[_Proxy]:
    made: list[Services] = []
    make = application.make_services

    def noted(*args: Any, **options: Any) -> Services:
        made.append(make(*args, **options))
        return made[-1]

    monkeypatch.setattr(application, "make_services", noted)
    app = create_app(Settings(upstreams=[fake.url], store=f"sqlite://{folder}/turns.db"))
    async with app.router.lifespan_context(app):
        [services] = made
        await until(lambda: _is_examined(services))
        yield _Proxy(app, services, fake)


def _is_examined(services: Services) -> bool:
    model = services.fleet.model
    return model is not None and model.tokenizer is not None and model.tokenizer.proof is not None


def _ids_in(body: bytes, *, stream: bool) -> list[int]:
    """The sampled ids that a client got."""
    chunks = [*data_of(body)] if stream else [json.loads(body)] if body else []
    choices = [choice for chunk in chunks if isinstance(chunk, dict) for choice in chunk.get("choices", ())]
    return [token for choice in choices for token in choice.get("token_ids") or ()]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_that_is_cancelled_at_any_await(
    fake: FakeVllm, stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _proxy(fake, tmp_path, monkeypatch) as proxy:
        for at in range(1, _MOST_AWAITS):
            session = f"s{at}"
            said: list[Any] = [user(f"Hi {at}")]
            asked = {"return_token_ids": True, "max_tokens": 50}
            fake.replies.append(Reply(ids=SPLIT))
            await proxy.ask("POST", CHAT, {"messages": said, **asked}, session=session)
            assert proxy.status == 200
            said += [json.loads(proxy.body)["choices"][0]["message"], user("more")]
            second = {"messages": said, **asked, "stream": stream}
            fake.replies.append(Reply(ids=SPLIT, pause_s=0.003))
            ended = await proxy.ask("POST", CHAT, second, session=session, at=at)
            got = _ids_in(proxy.body, stream=stream)
            await until(proxy.holds_nothing)
            await proxy.services.history.tasks.settle()
            fake.replies.clear()
            await proxy.ask("GET", f"/v1/sessions/{session}/samples")
            [sample] = json.loads(proxy.body)["samples"]
            turns = sample["turns"]
            assert not got or len(turns) == 2, (at, got, turns)
            if len(turns) == 2:
                sampled = sample["completion_ids"][turns[1]["start"] : turns[1]["end"]]
                assert sampled == list(SPLIT)[: len(sampled)], at
                assert len(sampled) >= len(got), at
                assert (turns[1]["finish_reason"] == "stop") == (sampled == list(SPLIT)), (at, turns)
            if ended:
                assert got == list(SPLIT)
                return
        raise AssertionError("the request has more awaits")
