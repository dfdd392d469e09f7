"""The route of an engine that renders as its chat completions do."""

import asyncio

import pytest

from chat_tokenizer import InvalidMessages
from chat_tokenizer.renderer import RenderOptions
from tests.support.fake_vllm import Canned, FakeVllm, Variant
from tests.support.tiny_model import TinyModel
from tokenproxy.base.errors import EngineBroken, Unsupported
from tokenproxy.engine.http import HttpEngine
from tokenproxy.engine.rendering import CHAT, RENDER, TOKENIZE, consumed, find_route, without_dates
from tokenproxy.fleet.tokenizers import EngineRenderings

_OTHER = Canned(b'{"tokens": [1, 2, 3]}', headers={"content-type": "application/json"})
_CONVERSATION = ([{"role": "user", "content": "Hi"}], RenderOptions())


async def test_route_is_the_first_with_the_ids_that_completions_consume(tiny_model: TinyModel) -> None:
    with FakeVllm(tiny_model, Variant.SCALE_OUT) as fake:
        engine = HttpEngine(fake.url)
        prompts = await consumed(engine)
        assert await find_route(engine, prompts) == TOKENIZE
        # as 0.32 does for gpt-oss: it renders with the template, and its completions with Harmony
        fake.canned[TOKENIZE.path] = _OTHER
        assert await find_route(engine, prompts) == RENDER
        for absent in (Canned(b"{}", 404), Canned(b"{}", 403)):
            fake.canned[RENDER.path] = absent
            assert await find_route(engine, prompts) == CHAT
        assert await CHAT.ids(engine, _CONVERSATION) == fake.model.render(list(_CONVERSATION[0]))
        fake.canned[CHAT.path] = Canned(b'{"choices": []}')
        assert await find_route(engine, await consumed(engine)) is None
        await engine.aclose()


async def test_answers_of_a_route(engine: HttpEngine, mortal: FakeVllm) -> None:
    for answer, error in (
        (Canned(b'{"error": {"message": "no system"}}', 400), InvalidMessages),
        (Canned(b"fails", 500), InvalidMessages),
        (Canned(b"{}", 404), Unsupported),
        (Canned(b'{"tokens": "1"}'), Unsupported),
        (Canned(b"{}", 503), EngineBroken),
    ):
        mortal.canned[TOKENIZE.path] = answer
        with pytest.raises(error):
            await TOKENIZE.ids(engine, _CONVERSATION)
    mortal.canned[CHAT.path] = Canned(b"fails", 500)
    with pytest.raises(InvalidMessages):
        await CHAT.ids(engine, _CONVERSATION)
    mortal.canned["/health"] = Canned(b"dead", 503)
    with pytest.raises(EngineBroken):
        await CHAT.ids(engine, _CONVERSATION)


async def test_engines_take_turns_and_stand_in_for_each_other(
    engine: HttpEngine, mortal: FakeVllm, tiny_model: TinyModel
) -> None:
    renderings = EngineRenderings(TOKENIZE)
    with FakeVllm(tiny_model) as other:
        second = HttpEngine(other.url)
        renderings.engines += [engine, second]
        for _ in range(4):
            await asyncio.to_thread(renderings, *_CONVERSATION)
        assert [len(fake.seen(TOKENIZE.path)) for fake in (mortal, other)] == [2, 2]
        mortal.canned[TOKENIZE.path] = Canned(b"{}", 503)
        expected = tiny_model.render(list(_CONVERSATION[0]))
        for _ in range(2):
            assert await asyncio.to_thread(renderings, *_CONVERSATION) == expected
        await second.aclose()


def test_days_do_not_differ() -> None:
    texts = ("Current date: 2026-11-25\n", "Current date: 2026-12-01\n")
    assert without_dates(texts[0]) == without_dates(texts[1]) != ""
