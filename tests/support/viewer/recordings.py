"""The recorded sessions that the page is tested with, how they get into a store, and proxies over it.

    small     every kind of turn once: see `small_session`
    hostile   HTML and scripts in everything that a model or a client chooses
    long      one path of more than 128,000 ids
    deep      2,000 turns with forks and sub-agents

and 10,000 sessions without turns, in a store of their own.
"""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

import msgspec

from tests.support.fake_vllm import FakeVllm
from tests.support.serve_process import ServeProcess
from tests.support.talk import call, result, user
from tests.support.tiny_model import TinyModel
from tests.support.viewer.recorder import (
    EMOJI,
    START,
    Recorded,
    SessionRecorder,
    answer,
    system,
)
from tests.support.viewer.small_session import READ_FILE, small_session
from tokenproxy.record.origin import RequestClass
from tokenproxy.record.store import Limits, Session, Store
from tokenproxy.record.turn import IndexedTurn, Turn, WeightSpan
from tokenproxy.record.vocabulary import Cause

HOSTILE, LONG, DEEP = "hostile", "long", "deep"
"""The names of sessions."""
MANY_SESSIONS = 10_000
FIRST_OF_MANY = "step-0000-000"
"""The one of them that was used first."""
LIMITS: Final = Limits(max_bytes=2**34, max_age_s=1e10)
"""Of stores with recordings: nothing is evicted."""
_HOUR_S = 3600.0
_WORDS = "there what is the in today user tool call think"
"""Words of one or two ids."""
_SECONDS_BETWEEN = 7.0
"""From the start of one of the many sessions to that of the next."""

HOSTILE_TEXTS = (
    "<script>window.hostileRan = 'script'; alert('script')</script>",
    "<img src=x onerror=\"window.hostileRan = 'img'; alert('img')\">",
    "\"><svg onload=\"window.hostileRan = 'svg'; alert('svg')\"></svg>",
    "<iframe src=\"javascript:parent.hostileRan = 'iframe'\"></iframe>",
    "<style>* { display: none !important }</style><base href='https://example.com/'>",
    "[click](javascript:alert('link')) ![](https://example.com/leak.png)",
    "</textarea></title></style></script><h1 id='injected'>injected</h1>",
    "{{constructor.constructor('alert(1)')()}} ${alert(1)} &lt;b&gt; %3Cscript%3E",
    "\u202eright to left\u202c \u200bzero width \x1b[31mred\x1b[0m \x00 \ufffd \u2028",
)
"""If one of them runs, it sets `window.hostileRan`, opens a dialog, asks another server, or makes an element
with the id `injected`."""


def hostile_session(model: TinyModel) -> Recorded:
    """HTML and scripts in the texts of the model, of tools and of the user, in names and in metadata."""
    payload = HOSTILE_TEXTS[0]
    tool = msgspec.json.decode(msgspec.json.encode(READ_FILE))
    tool["function"] |= {"name": payload, "description": HOSTILE_TEXTS[1]}
    metadata: dict[str, object] = {text: text for text in HOSTILE_TEXTS}
    metadata |= {"__proto__": {"polluted": True}, "constructor": payload}
    record = SessionRecorder(model, HOSTILE, start=START + 2 * _HOUR_S, tools=[tool], metadata=metadata)
    named: dict[str, Any] = {
        "model": HOSTILE_TEXTS[1],
        "requested_model": payload,
        "replica": "javascript:alert('replica')",
        "request_class": HOSTILE_TEXTS[2],
        "agent": payload,
        "parent_agent": HOSTILE_TEXTS[6],
        "stop_reason": payload,
    }
    turn: Turn | None = None
    for number, text in enumerate(HOSTILE_TEXTS):
        arguments = msgspec.json.encode({"path": text, "__proto__": text}).decode()
        calls = [call(text, arguments, f"call_{number}")]
        sampled = answer(model, text, thinking=text, calls=calls)
        new = [result({"id": f"call_{number - 1}"}, text), user(text)] if turn else [system(text), user(text)]
        versions = (WeightSpan(text, 0, len(sampled.ids)),)
        turn = record.turn(new, sampled, parent=turn, weight_versions=versions, **named)
    return record.recorded()


def long_session(model: TinyModel, words: int = 1_240, turns: int = 64) -> Recorded:
    """One path of so many words in each turn, together more than 128,000 ids."""
    drawn = random.Random("long")
    record = SessionRecorder(model, LONG, start=START + 3 * _HOUR_S, metadata={"task": LONG})
    turn: Turn | None = None
    for _ in range(turns):
        turn = record.turn([user(_sentence(drawn, 20))], answer(model, _sentence(drawn, words)), parent=turn)
    return record.recorded()


def deep_session(model: TinyModel, turns: int = 2_000) -> Recorded:
    """Many short turns: every 20th is a fork, every 50th begins a sub-agent."""
    drawn = random.Random("deep")
    record = SessionRecorder(model, DEEP, start=START + 4 * _HOUR_S, metadata={"task": DEEP})
    turn: Turn | None = None
    for number in range(turns):
        sampled = answer(model, _sentence(drawn, 8))
        if turn is None:
            turn = record.turn([user(_sentence(drawn, 5))], sampled)
        elif number % 50 == 0:
            agent: dict[str, Any] = {"request_class": RequestClass.SUBAGENT, "agent": f"agent-{number}"}
            opening = [system("You search files."), user(_sentence(drawn, 5))]
            turn = record.turn(opening, sampled, **agent)
        else:
            forks = number % 20 == 0
            before = drawn.choice(list(record.turns.values())) if forks else turn
            kept: dict[str, Any] = {"request_class": before.request_class, "agent": before.agent}
            turn = record.turn([user(_sentence(drawn, 5))], sampled, parent=before, **kept)
    record.rewards |= {"": 1.0}
    return record.recorded()


def many_sessions() -> Iterator[Recorded]:
    """Sessions without turns: the list reads none."""
    for number in range(MANY_SESSIONS):
        metadata = msgspec.json.encode({"step": number // 256, "task": f"task-{number % 40}"})
        used = START + _SECONDS_BETWEEN * number
        name = f"step-{number // 256:04d}-{number % 256:03d}"
        yield Recorded(Session(id=name, metadata=metadata, created=used, used=used), [])


def _sentence(drawn: random.Random, words: int) -> str:
    """So many words, and an emoji now and then."""
    chosen = drawn.choices(_WORDS.split(), k=words)
    if drawn.random() < 0.2:
        chosen.append(drawn.choice(EMOJI))
    return " ".join(chosen).capitalize() + "."


def recordings(name: str, model: TinyModel) -> Iterable[Recorded]:
    """What a proxy has recorded: `two` sessions, a `few` or `many`."""
    if name == "many":
        return many_sessions()
    two = [small_session(model).recorded, hostile_session(model)]
    return two if name == "two" else [*two, long_session(model), deep_session(model)]


async def write(store: Store, recordings: Iterable[Recorded]) -> None:
    """Write sessions into an open store, with the times at which they were used."""
    for recorded in sorted(recordings, key=lambda recorded: recorded.session.used):
        with mock.patch("time.time", lambda used=recorded.session.used: used):
            await _write(store, recorded)


async def _write(store: Store, recorded: Recorded) -> None:
    await store.add(recorded.session, [IndexedTurn(turn) for turn in recorded.turns])
    if recorded.rewards:
        await store.finish(recorded.session.id, Cause.REWARD, recorded.rewards)


@dataclass(frozen=True)
class RecordedProxy:
    """A running proxy whose store holds recorded sessions."""

    url: str
    store: str
    """The URL of its store. Other processes may write to it while the proxy runs."""


@contextmanager
def run_recorded_proxy(model: TinyModel, store: str, log: Path) -> Iterator[RecordedProxy]:
    """Serve over a store, in a process of its own before a fake engine; nothing in it becomes too old."""
    kept = ("--store", store, "--store-max-age-s", "1e10", "--finish-after-s", "0")
    with FakeVllm(model) as engine, ServeProcess([engine.url], log, *kept) as process:
        process.wait_ready()
        yield RecordedProxy(process.url, store)
