import asyncio
import json
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers
from transformers import AutoTokenizer

from chat_tokenizer import ChatTokenizer
from chat_tokenizer.files import is_here
from tests.support.fake_vllm import Canned, FakeVllm
from tests.support.talk import CHAT, user
from tests.support.tiny_model import CHATML, TinyModel
from tests.support.utils import run_app, run_proxy, wait_until
from tokenproxy.base.errors import EngineBroken, RendererUnavailable, Unsupported
from tokenproxy.engine.discovery import Model
from tokenproxy.engine.http import HttpEngine
from tokenproxy.engine.protocol import EngineWithCredential
from tokenproxy.fleet.replica import Replica
from tokenproxy.fleet.tokenizers import Tokenizers
from tokenproxy.monitoring.metrics import Metrics
from tokenproxy.settings import Settings

_MISSING = Model("tiny", "/no/such/folder", None)


@pytest.fixture
async def engine(mortal: FakeVllm) -> AsyncIterator[HttpEngine]:
    engine = HttpEngine(mortal.url)
    yield engine
    mortal.canned["/tokenize"] = Canned(b"", 503)  # ends a proof that asks the engine
    for thread in threading.enumerate():
        if thread.name == "prove":
            await asyncio.to_thread(thread.join)
    await engine.aclose()


@pytest.fixture
def model(tiny_model: TinyModel) -> Model:
    return Model("tiny", str(tiny_model.folder), None)


async def test_tokenizer_is_loaded_once_for_all_engines(engine: HttpEngine, model: Model) -> None:
    tokenizers = Tokenizers()
    found = await asyncio.gather(*(tokenizers.find(engine, model) for _ in range(3)))
    assert found[0] is found[1] is found[2]


async def test_tokenizer_setting_overrides_the_engines_model(engine: HttpEngine, model: Model) -> None:
    for reported in (_MISSING, None):
        assert (await Tokenizers(model.root).find(engine, reported)).source == model.root
    with pytest.raises(Unsupported, match="set `tokenizer`") as caught:
        await Tokenizers().find(engine, None)
    assert (caught.value.code, caught.value.param) == ("no_tokenizer", "append_messages")


async def test_failed_load_is_reported_and_retried(engine: HttpEngine, tmp_path: Path, model: Model) -> None:
    """All waiting replicas get the error; the next request loads again."""
    tokenizers = Tokenizers()
    later = Model("tiny", str(tmp_path / "later"), None)
    asking = (tokenizers.find(engine, later) for _ in range(3))
    problems = await asyncio.gather(*asking, return_exceptions=True)
    assert [getattr(problem, "code", problem) for problem in problems] == ["no_tokenizer"] * 3
    assert later.root in str(problems[0])
    await asyncio.to_thread(Path(later.root).symlink_to, model.root)
    assert (await tokenizers.find(engine, later)).source == later.root


def test_end_of_the_process_does_not_wait_for_a_tokenizer_that_loads(
    monkeypatch: pytest.MonkeyPatch, mortal: FakeVllm
) -> None:
    loading, answers = threading.Event(), threading.Event()

    def load(*arguments: object, **options: object) -> None:
        loading.set()
        answers.wait()
        raise OSError("the hub answers too late")

    async def stop_meanwhile() -> None:
        engine = HttpEngine(mortal.url)
        finding = asyncio.create_task(Tokenizers("of/a-hub").find(engine, None))
        await asyncio.to_thread(loading.wait)
        finding.cancel()
        await engine.aclose()

    monkeypatch.setattr(ChatTokenizer, "load", load)
    try:
        asyncio.run(stop_meanwhile())  # at its end it waits for threads that may not be left alone
    finally:
        answers.set()  # else a test that fails here would never end


def test_what_is_in_a_folder_or_in_the_hubs_cache_needs_no_download(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--of--a-hub" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    assert [is_here(source) for source in (str(tmp_path), "/missing", "of/a-hub")] == [True, True, False]
    (snapshot / "tokenizer.json").touch()
    assert is_here("of/a-hub") and not is_here("of/another")


def test_no_prompt_waits_for_a_download(monkeypatch: pytest.MonkeyPatch, mortal: FakeVllm) -> None:
    """A machine without a network may wait for it for ever. The tokenizer is used once it is there."""
    answers, load = threading.Event(), ChatTokenizer.load

    def download(source: str, **options: Any) -> ChatTokenizer:
        answers.wait(20)
        return load(mortal.model.folder, **options)

    monkeypatch.setattr(ChatTokenizer, "load", download)
    mortal.root = "of/a-hub"
    settings = Settings(upstreams=[mortal.url], store="memory:", watch_interval_s=0.05)
    with run_app(settings) as client:
        answer = client.post(CHAT, json={"messages": [user("Hi")]})
        assert (answer.status_code, answers.is_set()) == (200, False)
        answers.set()
        wait_until(lambda: client.get("/ready").json()["engines"][0]["append"] == "ready")


@pytest.mark.parametrize(
    "change",
    [
        (CHATML, "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"),
        ("'<tool_call>'", "'<call>'"),
        ("'<|im_start|>' + message.role", "'<|im_start|>' + message.role | replace('tool', 'user')"),
    ],
)
async def test_engine_renders_where_its_template_is_another(
    engine: HttpEngine, model: Model, mortal: FakeVllm, change: tuple[str, str]
) -> None:
    chatml = CHATML.replace("message.role + '\n'", "message.role + '\\n'")
    mortal.chat_template = change[1] if change[0] == CHATML else chatml.replace(*change)
    assert mortal.chat_template != chatml
    asking = await Tokenizers().find(engine, model)
    loaded = await Tokenizers(None, mortal.chat_template).find(engine, model)
    assert (asking.engine_renders, loaded.engine_renders) == (True, False)
    turn = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    new = [{"role": "user", "content": "And?"}]
    appended = await asyncio.to_thread(asking.append, [1], new, history=turn)
    assert appended.suffix_ids == loaded.append([1], new, history=turn).suffix_ids


async def test_engine_that_renders_otherwise_since_is_asked_no_more(
    engine: HttpEngine, model: Model, mortal: FakeVllm
) -> None:
    """Not for what was appended with its earlier renderings, nor after it left the fleet."""
    tokenizers, found = Tokenizers(), []
    for role in ("upper", "title"):
        mortal.chat_template = CHATML.replace("message.role + ", f"message.role | {role} + ")
        lent = EngineWithCredential(engine, (b"authorization", role.encode()))
        found.append(await tokenizers.find(lent, model))
    assert found[0].fingerprint != found[1].fingerprint
    messages = [{"role": "user", "content": "Hi"}]
    assert "User" in found[1].decode(await asyncio.to_thread(found[1].render, messages))
    await Replica(engine, tokenizers, Metrics(), 5.0).stop()
    for tokenizer in found:
        with pytest.raises(RendererUnavailable):
            await asyncio.to_thread(tokenizer.render, messages)


async def test_event_loop_never_waits_for_a_rendering(
    engine: HttpEngine, model: Model, mortal: FakeVllm
) -> None:
    """What requests read on the event loop is known before the engine is ready."""
    mortal.chat_template = CHATML.replace("message.role + ", "message.role | upper + ")
    tokenizer = await Tokenizers().find(engine, model)
    assert (tokenizer.merges_system, tokenizer.effort_without_thinking) == (False, "none")
    with pytest.raises(RuntimeError, match="on the event loop"):
        tokenizer.render([{"role": "user", "content": "Hi"}])


def test_messages_of_anthropics_api_continue_what_the_engine_renders(mortal: FakeVllm) -> None:
    mortal.chat_template = CHATML.replace("message.role + ", "message.role | upper + ")
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "thinking": {"type": "disabled"}}
    body["messages"] = [{"role": "user", "content": "Hi"}]
    with run_proxy([mortal], store="memory:") as client:
        for source in ("rendered", "extended"):
            answer = client.post("/v1/messages", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-prompt-source"] == source
            turn = {"role": "assistant", "content": answer.json()["content"]}
            body["messages"] += [turn, {"role": "user", "content": "And?"}]


@pytest.mark.parametrize("fits", [True, False])
async def test_mistrals_own_vocabulary_comes_first_where_it_has_the_engines_ids(
    engine: HttpEngine, model: Model, mortal: FakeVllm, monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    mortal.chat_template = CHATML.replace("message.role + ", "message.role | upper + ")
    tekken = AutoTokenizer.from_pretrained(model.root)
    tekken.chat_template = None
    tekken.add_tokens("[TEKKEN]")
    if not fits:
        tekken.backend_tokenizer.normalizer = normalizers.Lowercase()
    monkeypatch.setattr("chat_tokenizer.files._tekken", lambda *_: tekken)
    found = await Tokenizers().find(engine, model)
    assert found.engine_renders
    assert (len(found.encode("[TEKKEN]")) == 1) is fits


@pytest.mark.parametrize("renders", ["template", "engine", "neither"])
async def test_tokenizer_file_as_it_is_where_transformers_builds_another(
    engine: HttpEngine, model: Model, mortal: FakeVllm, tmp_path: Path, renders: str
) -> None:
    """transformers 5 makes a Llama's another one than the file's, which vLLM's modes for DeepSeek take."""
    folder = Path(shutil.copytree(model.root, tmp_path / "llama"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | {"tokenizer_class": "LlamaTokenizerFast"})
    )
    if renders != "template":
        mortal.chat_template = CHATML.replace("message.role + ", "message.role | upper + ")
    if renders == "neither":
        vocabulary = json.loads((folder / "tokenizer.json").read_text())
        vocabulary["model"]["merges"].reverse()
        (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
        with pytest.raises(Unsupported, match=r"for '.*' it gives \[\d.*\], the engine \[\d") as caught:
            await Tokenizers().find(engine, Model("tiny", str(folder), None))
        assert caught.value.code == "tokenizer_mismatch"
        return
    found = await Tokenizers().find(engine, Model("tiny", str(folder), None))
    assert found.engine_renders is (renders == "engine")
    assert found.encode("What is 2 + 2?") == mortal.model.encode("What is 2 + 2?")


async def test_conversations_that_the_template_refuses_are_skipped(
    engine: HttpEngine, model: Model, mortal: FakeVllm
) -> None:
    mortal.chat_template = (
        "{% if messages | length > 1 %}{{ raise_exception('one turn') }}{% endif %}"
        "{{ messages[0].content }}<|im_end|>"
    )
    await Tokenizers(None, mortal.chat_template).find(engine, model)


async def test_engine_that_renders_nothing_or_nonsense_is_refused(
    engine: HttpEngine, model: Model, mortal: FakeVllm
) -> None:
    for answer in (Canned(b"", 404), Canned(b'{"tokens": "1"}')):
        mortal.canned["/tokenize"] = mortal.canned["/v1/chat/completions"] = answer
        with pytest.raises(Unsupported, match="renders no conversation") as caught:
            await Tokenizers().find(engine, model)
        assert caught.value.code == "tokenizer_unchecked"
    mortal.canned["/tokenize"] = Canned(b"", 503)
    with pytest.raises(EngineBroken, match="503 for /tokenize; retrying later"):
        await Tokenizers().find(engine, model)


_EITHER = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ '[' + part.text + ']' }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Prints text and parts differently. vLLM detects that it takes parts."""


async def test_content_format_is_the_one_that_the_engine_runs_with(
    engine: HttpEngine, model: Model, mortal: FakeVllm
) -> None:
    """The engine, which passes content as text, runs with `--chat-template-content-format string`."""
    mortal.chat_template = _EITHER
    tokenizers = Tokenizers(None, _EITHER)
    tokenizer = await tokenizers.find(engine, model)
    assert tokenizer.content_format == "string"
    assert await tokenizers.find(engine, model) is tokenizer
    user = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert "user\na\nb<|im_end|>" in tokenizer.decode(tokenizer.append([1], [user]).suffix_ids)
    other = Tokenizers(None, _EITHER, content_format="openai")
    assert (await other.find(engine, model)).engine_renders
