"""Names of models that nobody serves: which model serves them, on every route."""

import secrets
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.fake_vllm import FakeVllm, Variant
from tests.support.talk import CHAT, GENERATE, user
from tests.support.tiny_model import TinyModel
from tests.support.utils import Pair, run_proxy
from tokenproxy.app.app import check_settings
from tokenproxy.settings import SettingsError, load_settings
from tokenproxy.turn.services import ModelAliases

_HI = [user("Hi")]


@pytest.fixture(scope="module")
def served(tiny_model: TinyModel) -> Iterator[Pair]:
    aliases = ["haiku=adapter", "claude-*=tiny", "adapter=tiny"]
    with (
        FakeVllm(tiny_model, Variant.SCALE_OUT) as engine,
        run_proxy([engine], model_aliases=aliases, store="memory:") as client,
    ):
        yield Pair(engine, client)


@pytest.mark.parametrize(
    "named, served_by",
    [
        ({"model": "haiku"}, "adapter"),
        ({"model": "claude-sonnet-9"}, "tiny"),
        ({"model": "adapter"}, "adapter"),  # what is served is no alias
        ({}, None),
    ],
)
def test_the_served_model_gets_the_request(
    served: Pair, named: dict[str, str], served_by: str | None
) -> None:
    session, asked = secrets.token_hex(4), named.get("model")
    served.client.post(CHAT, json={**named, "messages": _HI}, headers={"x-session-id": session})
    assert served.fake.last(CHAT).json.get("model") == served_by
    [turn] = served.client.get(f"/v1/sessions/{session}").json()["turns"]
    assert turn["model"] == (served_by or "tiny")
    assert turn["requested_model"] == (asked if asked != served_by else None)


def test_one_name_and_another_are_one_conversation(served: Pair) -> None:
    messages = [user(f"Hi {secrets.token_hex(6)}")]
    first = served.client.post(CHAT, json={"model": "claude-a", "messages": messages}).json()
    messages += [first["choices"][0]["message"], user("More")]
    second = served.client.post(CHAT, json={"model": "claude-b", "messages": messages})
    assert second.headers["x-prompt-source"] == "extended"


@pytest.mark.parametrize(
    "path, body",
    [
        (GENERATE, {"token_ids": [1, 2], "sampling_params": {"max_tokens": 4}}),
        ("/v1/chat/completions/tokens", {"prompt_ids": [1, 2]}),
        ("/v1/embeddings", {"input": "Hi"}),
    ],
)
def test_every_inference_route(served: Pair, path: str, body: Any) -> None:
    before = len(served.fake.requests)
    served.client.post(path, json={**body, "model": "claude-x"})
    posted = [seen.json for seen in served.fake.from_clients(before) if seen.body]
    assert posted and {fields["model"] for fields in posted} == {"tiny"}


def test_without_aliases_the_engine_decides(pair: Pair) -> None:
    pair.client.post(CHAT, json={"model": "nobody", "messages": _HI})
    assert pair.fake.last().json["model"] == "nobody"


async def test_patterns() -> None:
    async def ask(question: object) -> bool:
        return False

    fleet: Any = SimpleNamespace(replicas=[], ask=ask)
    assert await ModelAliases(["*haiku*=org/m=1"]).served_name("claude-haiku-4-5", fleet) == "org/m=1"
    for pattern, name in (("claude-*", "a-claude-3"), ("a[1m]", "a1"), ("haiku", "Haiku")):
        assert await ModelAliases([f"{pattern}=m"]).served_name(name, fleet) == name


async def test_an_adapter_that_is_loaded_later_is_served() -> None:
    """The engines are asked again after a while."""
    now, asked, served = [0.0], [], [False]

    async def ask(question: object) -> bool:
        asked.append(now[0])
        return served[0]

    fleet: Any = SimpleNamespace(replicas=[], ask=ask)
    aliases = ModelAliases(["late*=tiny"], clock=lambda: now[0])
    names = []
    for now[0], served[0] in ((0.0, False), (0.9, True), (1.0, True)):
        names.append(await aliases.served_name("late-1", fleet))
    assert (names, asked) == (["tiny", "tiny", "late-1"], [0.0, 1.0])


def test_the_setting(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("model_aliases: {haiku: org/model=1, '*': m}\n")
    assert load_settings(file).model_aliases == ["haiku=org/model=1", "*=m"]
    for wrong in ("haiku", "=m", "haiku=", " = "):
        with pytest.raises(SettingsError, match=r"model_aliases: .*NAME=MODEL"):
            check_settings(load_settings(model_aliases=[wrong]), 1)
