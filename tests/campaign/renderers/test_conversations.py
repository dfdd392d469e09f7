"""Conversations with models that have no chat template, on a real vLLM that renders them itself.

The weights are random, and a logits processor makes each request sample the turn that the test wrote for it:
texts, thinking and calls as the model would form them, but spelled letter by letter. So a prompt that is
rendered anew always has other ids, and every turn of the client is one that vLLM's parsers read.
"""

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from tests.campaign.real_vllm.conftest import START_TIMEOUT_S, WAYS, run_way
from tests.support.renderers.engine import EngineRenderer
from tests.support.renderers.models import MODELS, RendererModel
from tests.support.renderers.pieces import Message
from tests.support.renderers.sampled import TURNS, Call, Said, spelled
from tests.support.talk import Answered, Conversation, user
from tests.support.templates.shapes import SYSTEM, TOOLS

pytest.importorskip("vllm")
from tests.support.renderers import script

pytestmark = pytest.mark.timeout(START_TIMEOUT_S + 300)
"""The first test of each model and way to run also waits for the start of its engine."""

_THINKS = {"chat_template_kwargs": {"thinking": True}}
_WEATHER: Call = ("weather", {"city": "Bern"})
_CLOCK: Call = ("clock", {"city": 'Zürich, "Oslo"'})
_RAINS = Said("☂ It rains.")
_WARM = Said("It has 17 °C.")
"""With tools, vLLM shows no character of several ids of Mistral's oldest tokenizer."""
_QUESTIONS = ("What is the weather in Bern?", "And in Oslo?", "Sure?", "Thanks.")
_STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@dataclass(frozen=True)
class Served:
    """A model, served in one of the ways to run."""

    model: RendererModel
    http: httpx.Client
    renderer: EngineRenderer
    """The engine's renderer in this process, as the oracle."""

    @property
    def is_mistral(self) -> bool:
        return self.model.mode == "mistral"

    @property
    def thinks_by_default(self) -> bool:
        """Whether prompts open the thinking of a turn unless asked not to."""
        return self.model.name in ("deepseek_v4", "deepseek_v41")


class Talk(Conversation):
    """A conversation with a model of which each prompt must hold all that came before as it was."""

    def __init__(self, served: Served, *messages: Message, stream: bool = False, **fields: Any) -> None:
        headers = {"X-Session-ID": secrets.token_hex(6)}
        super().__init__(served.http, list(messages), {"max_tokens": 600, **fields}, headers)
        self.served, self.stream = served, stream
        self.turns: list[Answered] = []

    def ids(self, said: Said, until: str = "", **fields: Any) -> list[int]:
        """Of a turn that answers a request with these fields; of a part that ends within its text."""
        asked = (self.fields | fields).get("chat_template_kwargs") or {}
        thinks = asked.get("thinking", self.served.thinks_by_default)
        earlier = sum(len(message.get("tool_calls") or ()) for message in self.messages)
        pieces = TURNS[self.served.model.name](replace(said, thinks=thinks, earlier=earlier))
        if until:
            pieces = [*pieces[: pieces.index(said.text)], until]
        return spelled(pieces, self.served.renderer.tokenizer)

    def ask(self, *new: Message, said: Said = _RAINS, **fields: Any) -> Answered:
        """Say something that is answered with a turn, and check the prompt and the answer."""
        ids = self.ids(said, **fields)
        body = {**self.fields, **fields, "messages": [*self.messages, *new]}
        turn = super().ask(*new, stream=self.stream, **(script.asked(ids) | fields))
        assert turn.ids == ids[: len(turn.ids)]
        if not {"max_tokens", "stop", "stop_token_ids"} & fields.keys():
            assert turn.ids == ids
            # in streams vLLM loses arguments of Mistral's oldest calls where a chunk holds several ids
            if not (self.stream and said.calls and self.served.model.name in ("mistral_v3", "mistral_v7")):
                assert _said(turn.message) == (said.text, list(said.calls), said.thought)
        if self.turns:
            self._check(turn, self.turns[-1], body)
        self.turns.append(turn)
        return turn

    def _check(self, turn: Answered, before: Answered, body: dict[str, Any]) -> None:
        whole = [*before.prompt_ids, *before.ids]
        assert turn.source == "extended"
        assert turn.continues(before)
        appended = turn.prompt_ids[len(whole) :]
        assert len(appended) == int(turn.prompt["appended"]) > 0
        anew = self.served.renderer.consumed(body)
        assert anew != turn.prompt_ids
        assert anew[-len(appended) :] == appended
        rest = anew[: -len(appended)]
        if before.ids[-1] not in self.served.model.stops:
            last_word = before.message["content"].split()[-1]
            assert self.served.renderer.text(rest).rstrip().endswith(last_word)
        elif self.served.model.name != "harmony":  # its history ends messages with <|end|>
            assert rest[-1] == before.ids[-1]


def _said(message: Message) -> tuple[str, list[Call], str]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [(function["name"], json.loads(function["arguments"])) for function in functions]
    return message.get("content") or "", calls, message.get("reasoning") or ""


@pytest.fixture(scope="module", params=MODELS)
def renderer(request: pytest.FixtureRequest) -> tuple[RendererModel, EngineRenderer]:
    """A model, with the engine's renderer in this process."""
    model = MODELS[request.param]
    return model, EngineRenderer(model)


@pytest.fixture(scope="module", params=WAYS)
def served(
    request: pytest.FixtureRequest,
    renderer: tuple[RendererModel, EngineRenderer],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    """A model that a real vLLM serves: with the plugin, or as it is, with a proxy in front of it."""
    model, oracle = renderer
    log = tmp_path_factory.mktemp(model.name) / "vllm.log"
    flags = (*model.flags, *script.FLAGS)
    environment = model.environment
    with (
        run_way(request.param, model.folder, log, *flags, environment=environment, template=False) as url,
        httpx.Client(base_url=url, timeout=240) as http,
    ):
        yield Served(model, http, oracle)


def _results(turn: Answered) -> list[Message]:
    """In another order than the calls."""
    calls = turn.message["tool_calls"]
    return [{"role": "tool", "tool_call_id": call["id"], "content": "17 °C"} for call in calls][::-1]


@_STREAMED
def test_follow_ups_of_users_are_exact(served: Served, stream: bool) -> None:
    talk = Talk(served, SYSTEM, stream=stream)
    for text in _QUESTIONS:
        talk.ask(user(text))


@_STREAMED
def test_follow_ups_with_tools_are_exact(served: Served, stream: bool) -> None:
    talk = Talk(served, stream=stream, tools=TOOLS)
    called = talk.ask(user("What is the weather in Bern?"), said=Said(calls=[_WEATHER]))
    talk.ask(*_results(called), said=_WARM)
    # gpt-oss calls one tool in a turn
    calls = [_CLOCK] if served.model.name == "harmony" else [_CLOCK, _WEATHER]
    called = talk.ask(user("And the time in Oslo?"), said=Said(calls=calls))
    called = talk.ask(*_results(called), said=Said(calls=[_WEATHER]))
    talk.ask(*_results(called), user("Be short."), said=_WARM)


@_STREAMED
def test_follow_ups_with_thinking_are_exact(served: Served, stream: bool) -> None:
    if served.is_mistral and served.model.name != "mistral_v13":
        pytest.skip("Mistral's tokenizers know thinking from version 13 on")
    asked = {} if served.is_mistral else _THINKS
    talk = Talk(served, stream=stream, **asked)
    # One turn has nothing but thinking. vLLM's grammars for Mistral forbid that, and after such a turn of
    # gpt-oss the engine renders the prompt.
    alone = "☂" if served.is_mistral or served.model.name == "harmony" else ""
    for text, answer in zip(_QUESTIONS, ("☂ It rains.", alone, "Yes.", "☂"), strict=True):
        talk.ask(user(text), said=Said(answer, thought="Look: ☂!"))


@_STREAMED
def test_follow_ups_with_thinking_and_tools_are_exact(served: Served, stream: bool) -> None:
    if served.is_mistral and served.model.name != "mistral_v13":
        pytest.skip("Mistral's tokenizers know thinking from version 13 on")
    asked = {} if served.is_mistral else _THINKS
    talk = Talk(served, stream=stream, tools=TOOLS, **asked)
    for text in _QUESTIONS[:2]:
        called = talk.ask(user(text), said=Said(calls=[_WEATHER], thought="Look: ☂!"))
        talk.ask(*_results(called), said=Said("☂ It rains.", thought="It rains."))


@pytest.mark.parametrize("by", ["length", "stop string", "stop token"])
def test_cut_turn_is_closed(served: Served, by: str) -> None:
    talk = Talk(served, chat_template_kwargs=None if served.is_mistral else {"thinking": False})
    limits: dict[str, dict[str, Any]] = {
        "length": {"max_tokens": len(talk.ids(_RAINS, "☂ It"))},
        "stop string": {"stop": ["rain"]},
        "stop token": {"stop_token_ids": talk.ids(_RAINS, "☂ It r")[-1:]},
    }
    cut = talk.ask(user("What is the weather in Bern?"), **limits[by])
    # the parser of Harmony reads ids, and shows what made the turn stop
    assert cut.message["content"].removesuffix("rain").rstrip() in ("☂ It", "☂ It r")
    talk.ask(user("And in Oslo?"))


def test_edited_history_is_rendered_by_the_engine(served: Served) -> None:
    talk = Talk(served)
    talk.ask(user("What is the weather in Bern?"))
    said = [talk.messages[0], {"role": "assistant", "content": "Rain."}, user("And in Oslo?")]
    turn = Conversation(served.http, said).ask(max_tokens=2)
    assert turn.source.startswith("rendered")
    assert turn.prompt_ids == served.renderer.consumed({"messages": said})
