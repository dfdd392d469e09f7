"""Conversations with models that have no chat template, on a real vLLM that renders them itself.

The weights are random, so that sampled ids are seldom those that their text has, and a prompt that is
rendered anew differs. A bias of the stop token and of the end of thinking makes turns of some ten ids. The
tools have one possible call each, for which a grammar leaves no choice but the spelling.
"""

import json
import math
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.acceptance.conftest import START_TIMEOUT_S, WAYS, start_engine
from tests.support.fake_vllm import data_of
from tests.support.renderers.conversations import appended_pieces
from tests.support.renderers.engine import EngineRenderer
from tests.support.renderers.layouts import LAYOUTS
from tests.support.renderers.models import MODELS, RendererModel
from tests.support.renderers.pieces import Message
from tests.support.serve_process import ServeProcess
from tests.support.talk import assembled, user
from tests.support.utils import wait_until

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


@dataclass
class Turn:
    """What the engine consumed and sampled."""

    prompt: list[int]
    sampled: list[int]
    finish: str
    message: Message
    source: str
    """With the reason, if there is one."""
    appended: int


@dataclass
class Talk:
    """A conversation as a client holds it: messages only."""

    served: Served
    fields: dict[str, Any]
    stream: bool
    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    session: str = field(default_factory=lambda: secrets.token_hex(6))

    def ask(self, *new: Message, **fields: Any) -> Turn:
        """Say something, and check that all that came before is in the prompt as it was."""
        history, self.messages = self.messages, [*self.messages, *new]
        body = {
            "messages": self.messages,
            "return_token_ids": True,
            "max_tokens": 400,
            "temperature": 1.0,
            "seed": len(self.turns),
            "logit_bias": self.served.bias(calls="tool_choice" in fields),
            **self.fields,
            **fields,
            **({"stream": True} if self.stream else {}),
        }
        response = self.served.http.post(
            "/v1/chat/completions", json=body, headers={"X-Session-ID": self.session}
        )
        assert response.status_code == 200, response.text
        turn = _turn_of(response)
        if self.turns:
            self._check(turn, history, list(new), fields)
        self.turns.append(turn)
        self.messages.append(turn.message)
        return turn

    def _check(self, turn: Turn, history: list[Message], new: list[Message], fields: dict[str, Any]) -> None:
        before = self.turns[-1]
        whole = [*before.prompt, *before.sampled]
        if before.finish == "length" and before.message.get("tool_calls"):
            # a call that was cut: nothing tells what would close it
            assert turn.source.startswith(("extended", "rendered"))
            return
        assert turn.source == "extended"
        assert turn.prompt[: len(whole)] == whole
        assert len(turn.prompt) - len(whole) == turn.appended > 0
        name = self.served.model.name
        if name in LAYOUTS and before.finish != "length":
            asked = {**self.fields, **fields}
            options = dict(asked.get("chat_template_kwargs") or {})
            pieces = appended_pieces(name, history, new, asked.get("tools") or [], options)
            assert turn.prompt[len(whole) :] == self.served.renderer.ids_of(pieces)


def _flags(model: RendererModel) -> tuple[str, ...]:
    # Mistral's newer grammars are for guidance, DeepSeek's structural tags for xgrammar
    backend = "guidance" if model.name in ("mistral_v11", "mistral_v13") else "xgrammar"
    grammars = {"backend": backend, "disable_any_whitespace": True}
    own = ("--structured-outputs-config", json.dumps(grammars), "--max-model-len", "8192")
    return (*own, *model.flags)


def _turn_of(response: httpx.Response) -> Turn:
    streamed = response.headers["content-type"].startswith("text/event-stream")
    chunks = (
        [each for each in data_of(response.content) if each["choices"]] if streamed else [response.json()]
    )
    [message] = assembled(response)
    choices = [chunk["choices"][0] for chunk in chunks]
    headers = response.headers
    reason = headers.get("x-prompt-reason")
    return Turn(
        prompt=chunks[0]["prompt_token_ids"],
        sampled=[token for choice in choices for token in choice.get("token_ids") or ()],
        finish=next(choice["finish_reason"] for choice in choices if choice.get("finish_reason")),
        message=message,
        source=headers["x-prompt-source"] + (f": {reason}" if reason else ""),
        appended=int(headers.get("x-prompt-appended", 0)),
    )


def _ready(url: str) -> bool:
    try:
        engines = httpx.get(f"{url}/ready", timeout=30).json().get("engines") or []
    except httpx.TransportError:
        return False
    return bool(engines) and all(engine["ready"] and engine["append"] == "ready" for engine in engines)


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
    inside = request.param == WAYS[0]
    with start_engine(
        model.folder, folder / "vllm.log", *_flags(model), plugin=inside, environment=model.environment
    ) as engine:
        engine.wait_ready(START_TIMEOUT_S)
        if inside:
            with httpx.Client(base_url=engine.url, timeout=240) as http:
                wait_until(lambda: _ready(engine.url), START_TIMEOUT_S)
                yield Served(model, http, oracle)
            return
        with (
            ServeProcess([engine.url], folder / "proxy.log", "--store", "memory:") as proxy,
            httpx.Client(base_url=proxy.url, timeout=240) as http,
        ):
            wait_until(lambda: _ready(proxy.url), START_TIMEOUT_S)
            yield Served(model, http, oracle)


def _results(turn: Turn) -> list[Message]:
    calls = turn.message.get("tool_calls") or []
    return [{"role": "tool", "tool_call_id": call["id"], "content": "17 °C, sunny"} for call in calls]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_follow_ups_of_users_are_exact(served: Served, stream: bool) -> None:
    talk = Talk(served, {}, stream, [_SYSTEM])
    for text in ("What is the weather in Bern?", "And in Oslo?", "Sure?", "Thanks."):
        talk.ask(user(text))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_follow_ups_with_tools_are_exact(served: Served, stream: bool) -> None:
    talk = Talk(served, {"tools": served.tools}, stream)
    called = talk.ask(user("What is the weather in Bern?"), tool_choice="required")
    assert called.message.get("tool_calls")
    talk.ask(*_results(called))
    called = talk.ask(user("And the time in Oslo?"), tool_choice="required")
    talk.ask(*_results(called), user("Be short."))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_follow_ups_with_thinking_are_exact(served: Served, stream: bool) -> None:
    if served.model.mode == "mistral":
        pytest.skip("vLLM refuses template arguments for Mistral's tokenizers")
    talk = Talk(served, {"chat_template_kwargs": {"thinking": True}}, stream)
    for text in ("What is the weather in Bern?", "And in Oslo?", "Sure?", "Thanks."):
        talk.ask(user(text))


def test_cut_turn_is_closed_by_the_stop_token(served: Served) -> None:
    if served.model.mode not in ("mistral", "deepseek_v32", "deepseek_v4", "deepseek_v41"):
        pytest.skip("its turns are closed by more than the stop token")
    fields = {} if served.model.mode == "mistral" else {"chat_template_kwargs": {"thinking": False}}
    talk = Talk(served, fields, False)
    cut = talk.ask(user("What is the weather in Bern?"), max_tokens=3, logit_bias={})
    assert cut.finish == "length"
    turn = talk.ask(user("And in Oslo?"))
    assert turn.prompt[len(cut.prompt) + len(cut.sampled)] == served.model.eos


def test_edited_history_is_rendered_by_the_engine(served: Served) -> None:
    talk = Talk(served, {}, False)
    talk.ask(user("What is the weather in Bern?"))
    said = [talk.messages[0], {"role": "assistant", "content": "Rain."}, user("And in Oslo?")]
    response = served.http.post(
        "/v1/chat/completions", json={"messages": said, "return_token_ids": True, "max_tokens": 2}
    )
    turn = _turn_of(response)
    assert turn.source.startswith("rendered")
    assert turn.prompt == served.renderer.consumed({"messages": said})
