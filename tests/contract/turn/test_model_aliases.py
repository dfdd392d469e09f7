"""Names of models that nobody serves: which model serves them, on every route."""

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.settings import SettingsError, load_settings
from proxy.turn.model_aliases import ModelAlias, parse_alias
from tests.support.fake_vllm import FakeVllm, Variant
from tests.support.talk import CHAT, GENERATE, user
from tests.support.tiny_model import TinyModel
from tests.support.utils import run_proxy

_ALIASES = ["haiku=adapter", "claude-*=tiny", "adapter=tiny", "late*=tiny"]


@pytest.fixture(scope="module")
def engine(tiny_model: TinyModel) -> Iterator[FakeVllm]:
    with FakeVllm(tiny_model, Variant.SCALE_OUT) as fake:
        yield fake


@pytest.fixture(scope="module")
def client(engine: FakeVllm) -> Iterator[httpx.Client]:
    with run_proxy([engine], model_aliases=_ALIASES, store="memory:") as client:
        yield client


def _ask(client: httpx.Client, engine: FakeVllm, model: str | None, **fields: Any) -> tuple[str, Any]:
    """The model that the engine was asked for, and the response."""
    session = secrets.token_hex(4)
    named = {} if model is None else {"model": model}
    body = {**named, "messages": [user("Hi")], **fields}
    answer = client.post(CHAT, json=body, headers={"x-session-id": session})
    assert answer.status_code == 200, answer.text
    [turn] = client.get(f"/v1/sessions/{session}").json()["turns"]
    seen = [each.json for each in engine.requests if each.path == CHAT]
    assert turn["model"] == seen[-1].get("model", "tiny")
    return seen[-1].get("model", ""), turn


@pytest.mark.parametrize(
    "named, served",
    [
        ("haiku", "adapter"),
        ("claude-sonnet-9", "tiny"),
        ("tiny", "tiny"),
        ("adapter", "adapter"),  # adapters stay what they are
        (None, ""),
    ],
)
def test_the_served_model_gets_the_request(
    client: httpx.Client, engine: FakeVllm, named: str | None, served: str
) -> None:
    model, turn = _ask(client, engine, named)
    assert model == served
    assert turn["requested_model"] == (named if named and named != served else None)


def test_an_override_is_mapped_too(client: httpx.Client, engine: FakeVllm) -> None:
    name = secrets.token_hex(4)
    client.post("/v1/sessions", json={"id": name, "overrides": {"model": "haiku"}})
    client.post(CHAT, json={"model": "tiny", "messages": [user("Hi")]}, headers={"x-session-id": name})
    assert client.get(f"/v1/sessions/{name}").json()["turns"][0]["model"] == "adapter"


def test_one_name_and_another_are_one_conversation(client: httpx.Client) -> None:
    messages = [user(f"Hi {secrets.token_hex(6)}")]
    first = client.post(CHAT, json={"model": "claude-a", "messages": messages}).json()
    messages += [first["choices"][0]["message"], user("More")]
    second = client.post(CHAT, json={"model": "claude-b", "messages": messages})
    assert second.headers["x-prompt-source"] == "extended"


def test_an_adapter_that_is_loaded_later_is_served(
    client: httpx.Client, engine: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.turn.model_aliases.UNKNOWN_S", 0.0)
    assert _ask(client, engine, "late-1")[0] == "tiny"
    engine.names.append("late-1")
    assert _ask(client, engine, "late-1")[0] == "late-1"


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/completions", {"prompt": "Hi"}),
        (GENERATE, {"token_ids": [1, 2], "sampling_params": {"max_tokens": 4}}),
        ("/v1/chat/completions/tokens", {"prompt_ids": [1, 2]}),
        ("/tokenize", {"messages": [user("Hi")]}),
        ("/v1/embeddings", {"input": "Hi"}),
    ],
)
def test_every_inference_route(client: httpx.Client, engine: FakeVllm, path: str, body: Any) -> None:
    engine.requests.clear()
    client.post(path, json={**body, "model": "claude-x"})
    posted = [seen.json for seen in engine.requests if seen.body]
    assert posted and {fields["model"] for fields in posted} == {"tiny"}


@pytest.mark.parametrize("body", [b"", b"[]", b'{"model": 5}', b'{"model": "claude'])
def test_what_cannot_be_read_is_passed_on(client: httpx.Client, engine: FakeVllm, body: bytes) -> None:
    engine.requests.clear()
    client.post("/v1/embeddings", content=body)
    assert [seen.body for seen in engine.requests if seen.path == "/v1/embeddings"] == [body]


def test_without_aliases_the_engine_is_not_asked(pair: Any) -> None:
    pair.fake.requests.clear()
    pair.client.post(CHAT, json={"model": "nobody", "messages": [user("Hi")]})
    seen = [each.json for each in pair.fake.requests if each.path == CHAT]
    assert seen[-1]["model"] == "nobody"


@pytest.mark.parametrize(
    "pattern, name, matches",
    [
        ("*", "anything", True),
        ("*haiku*", "claude-haiku-4-5", True),
        ("claude-*", "claude-3", True),
        ("claude-*", "a-claude-3", False),
        ("a[1m]", "a[1m]", True),
        ("a[1m]", "a1", False),
        ("a?", "a?", True),
        ("a?", "ab", False),
        ("haiku", "Haiku", False),
    ],
)
def test_patterns(pattern: str, name: str, matches: bool) -> None:
    assert ModelAlias(pattern, "m").matches(name) is matches


@pytest.mark.parametrize("text", ["", "haiku", "=m", "haiku=", " = "])
def test_what_is_no_alias(text: str) -> None:
    with pytest.raises(ValueError, match="NAME=MODEL"):
        parse_alias(text)


def test_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ["haiku=org/model=1", "*=m"]
    file = tmp_path / "settings.yaml"
    file.write_text("model_aliases: {haiku: org/model=1, '*': m}\n")
    assert load_settings(file).model_aliases == expected
    monkeypatch.setenv("TOKENPROXY_MODEL_ALIASES", "haiku=org/model=1,*=m")
    assert load_settings().model_aliases == expected
    assert parse_alias(expected[0]) == ModelAlias("haiku", "org/model=1")
    with pytest.raises(SettingsError, match=r"model_aliases: .*NAME=MODEL"):
        load_settings(model_aliases=["haiku"])
