"""Conversations with models that have no chat template, on a real vLLM that renders them itself.

The weights are random, so that sampled ids are seldom those that their text has, and a prompt that is
rendered anew differs. A bias of the stop token and of the end of thinking makes turns of some ten ids. The
tools have one possible call each, for which a grammar leaves no choice but the spelling.
"""

import json
import math
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.campaign.real_vllm.conftest import START_TIMEOUT_S, WAYS, run_way
from tests.support.renderers.conversations import appended_pieces
from tests.support.renderers.engine import EngineRenderer
from tests.support.renderers.layouts import LAYOUTS
from tests.support.renderers.models import MODELS, RendererModel
from tests.support.renderers.pieces import Message
from tests.support.talk import Answered, Conversation, user

pytest.importorskip("vllm")
pytestmark = pytest.mark.timeout(START_TIMEOUT_S + 300)
"""The first test of each model and way to run also waits for the start of its engine."""

_TURN_IDS = 12
"""How many ids a turn has on average."""
_TURNS: dict[str, tuple[str, ...]] = {
    "deepseek": ("</think>",),
    "mistral_v11": ("[TOOL_CALLS]",),
    "mistral_v13": ("[/THINK]", "[TOOL_CALLS]"),
}
"""What else of a turn is made probable: the end of thinking, and the beginning of required calls."""
_TOOLS: list[Message] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Tells the {name}.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": [city]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name, city in (("weather", "Bern"), ("clock", "Oslo"))
]
_SYSTEM = {"role": "system", "content": "Be brief, and true."}


@dataclass(frozen=True)
class Served:
    """A model, served in one of the ways to run."""

    model: RendererModel
    http: httpx.Client
    renderer: EngineRenderer
    """The engine's renderer in this process, as the oracle."""

    @property
    def tools(self) -> list[Message]:
        """`_TOOLS`; with Mistral's grammar a tool that is not strict may be called by any name."""
        if self.model.mode != "mistral":
            return _TOOLS
        return [{**tool, "function": {**tool["function"], "strict": True}} for tool in _TOOLS]

    def bias(self, calls: bool) -> dict[str, float]:
        """Of the tokens that end a turn or its thinking, or begin calls."""
        ends = (self.model.eos,) if isinstance(self.model.eos, int) else self.model.eos[:1]
        found = [text for name, texts in _TURNS.items() if self.model.name.startswith(name) for text in texts]
        found = [text for text in found if calls or text != "[TOOL_CALLS]"]
        vocabulary = self.renderer.tokenizer.get_vocab()
        size = json.loads((self.model.folder / "config.json").read_text())["vocab_size"]
        biased = (*ends, *(vocabulary[text] for text in found))
        return {str(token): math.log(size / _TURN_IDS) for token in biased}


class Talk(Conversation):
    """A conversation with a model of which each prompt must hold all that came before as it was."""

    def __init__(self, served: Served, *messages: Message, stream: bool = False, **fields: Any) -> None:
        sampling = {"max_tokens": 400, "temperature": 1.0}
        headers = {"X-Session-ID": secrets.token_hex(6)}
        super().__init__(served.http, list(messages), {**sampling, **fields}, headers)
        self.served, self.stream = served, stream
        self.turns: list[Answered] = []

    def ask(self, *new: Message, **fields: Any) -> Answered:
        """Say something, and check the prompt."""
        history = self.messages
        bias = self.served.bias(calls="tool_choice" in fields)
        varied = {"seed": len(self.turns), "logit_bias": bias, **fields}
        turn = super().ask(*new, stream=self.stream, **varied)
        if self.turns:
            self._check(turn, history, list(new), fields)
        self.turns.append(turn)
        return turn

    def _check(
        self, turn: Answered, history: list[Message], new: list[Message], fields: dict[str, Any]
    ) -> None:
        before = self.turns[-1]
        whole = [*before.prompt_ids, *before.ids]
        if before.finish == "length" and before.message.get("tool_calls"):
            # a call that was cut: nothing tells what would close it
            assert turn.source.startswith(("extended", "rendered"))
            return
        assert turn.source == "extended"
        assert turn.continues(before)
        assert len(turn.prompt_ids) - len(whole) == int(turn.prompt["appended"]) > 0
        name = self.served.model.name
        if name in LAYOUTS and before.finish != "length":
            asked = {**self.fields, **fields}
            options = dict(asked.get("chat_template_kwargs") or {})
            pieces = appended_pieces(name, history, new, asked.get("tools") or [], options)
            assert turn.prompt_ids[len(whole) :] == self.served.renderer.ids_of(pieces)


def _flags(model: RendererModel) -> tuple[str, ...]:
    # Mistral's newer grammars are for guidance, DeepSeek's structural tags for xgrammar
    backend = "guidance" if model.name in ("mistral_v11", "mistral_v13") else "xgrammar"
    grammars = {"backend": backend, "disable_any_whitespace": True}
    own = ("--structured-outputs-config", json.dumps(grammars), "--max-model-len", "8192")
    return (*own, *model.flags)


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
    folder = tmp_path_factory.mktemp(model.name)
    with (
        run_way(
            request.param,
            model.folder,
            folder / "vllm.log",
            *_flags(model),
            environment=model.environment,
            template=False,
        ) as url,
        httpx.Client(base_url=url, timeout=240) as http,
    ):
        yield Served(model, http, oracle)


def _results(turn: Answered) -> list[Message]:
    calls = turn.message.get("tool_calls") or []
    return [{"role": "tool", "tool_call_id": call["id"], "content": "17 °C, sunny"} for call in calls]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_follow_ups_of_users_are_exact(served: Served, stream: bool) -> None:
    talk = Talk(served, _SYSTEM, stream=stream)
    for text in ("What is the weather in Bern?", "And in Oslo?", "Sure?", "Thanks."):
        talk.ask(user(text))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_follow_ups_with_tools_are_exact(served: Served, stream: bool) -> None:
    talk = Talk(served, stream=stream, tools=served.tools)
    called = talk.ask(user("What is the weather in Bern?"), tool_choice="required")
    assert called.message.get("tool_calls")
    talk.ask(*_results(called))
    called = talk.ask(user("And the time in Oslo?"), tool_choice="required")
    talk.ask(*_results(called), user("Be short."))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_follow_ups_with_thinking_are_exact(served: Served, stream: bool) -> None:
    if served.model.mode == "mistral":
        pytest.skip("vLLM refuses template arguments for Mistral's tokenizers")
    talk = Talk(served, stream=stream, chat_template_kwargs={"thinking": True})
    for text in ("What is the weather in Bern?", "And in Oslo?", "Sure?", "Thanks."):
        talk.ask(user(text))


def test_cut_turn_is_closed_by_the_stop_token(served: Served) -> None:
    if served.model.mode not in ("mistral", "deepseek_v32", "deepseek_v4", "deepseek_v41"):
        pytest.skip("its turns are closed by more than the stop token")
    talk = Talk(served)
    if served.model.mode != "mistral":
        talk.fields["chat_template_kwargs"] = {"thinking": False}
    cut = talk.ask(user("What is the weather in Bern?"), max_tokens=3, logit_bias={})
    assert cut.finish == "length"
    turn = talk.ask(user("And in Oslo?"))
    assert turn.prompt_ids[len(cut.prompt_ids) + len(cut.ids)] == served.model.eos


def test_edited_history_is_rendered_by_the_engine(served: Served) -> None:
    talk = Talk(served)
    talk.ask(user("What is the weather in Bern?"))
    said = [talk.messages[0], {"role": "assistant", "content": "Rain."}, user("And in Oslo?")]
    turn = Conversation(served.http, said).ask(max_tokens=2)
    assert turn.source.startswith("rendered")
    assert turn.prompt_ids == served.renderer.consumed({"messages": said})
