"""A fake engine whose model works on a task: what it samples follows from the text of its prompt.

It renders with the chat template of the demo and a part of the demo's vocabulary, samples ids that no
tokenizer gives for their text, and parses tool calls in Hermes notation as it streams.
"""

import json
import re
import secrets
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from proxy.demo.checkpoint import TEMPLATE_FILE
from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.templates.vocabularies import smollm2_merges
from tests.support.tiny_model import END, SPECIAL_TOKENS, TinyModel, save_model

_ASSISTANT = "<|im_start|>assistant\n"
_OPENED, _CLOSED = "<tool_call>\n", "}\n</tool_call>"
_CALL = re.compile(r'\{"name": "([^"]*)", "arguments": ')
_SAMPLED_CHARACTERS = 5
"""Characters that are encoded alone: the ids of an answer are not those of a tokenizer."""


_Parsed = tuple[str, list[tuple[str, str]]]
"""Content, and name and arguments of each call."""


def make_task_model(folder: Path) -> TinyModel:
    """The demo's chat template over the first tokens of the demo's vocabulary."""
    vocab, merges = smollm2_merges()
    tokens = [*SPECIAL_TOKENS, *sorted(vocab, key=vocab.__getitem__)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return save_model(folder, tokenizer, TEMPLATE_FILE.read_text(), len(tokens))


def call(name: str, **arguments: Any) -> str:
    """A tool call as the model samples it."""
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What the model samples after a prompt whose last messages match."""

    after: str
    """A pattern that is searched in the messages after the last one of the model."""
    text: str
    faults: tuple[dict[str, Any], ...] = ()
    """Fields of `Reply` for its first generations."""
    within: str = ""
    """A pattern that is searched in the whole prompt."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A generation."""

    step: Step | None
    """None if no step was for this prompt."""
    prompt: list[int]
    ids: tuple[int, ...]
    new: str
    """The messages after the last one of the model."""
    sent: tuple[int, ...]
    """Those of `ids` that were sent as a stream: fewer if the answer was scripted to break, or to be held."""


@dataclass
class Script:
    """The steps of a task, and what was sampled by them. Outlives an engine that is killed."""

    steps: Sequence[Step]
    sampled: list[Sampled] = field(default_factory=list)
    counts: Counter[Step] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    otherwise: str = "Fine."

    def choose(self, new: str, prompt: str) -> tuple[Step | None, str]:
        """The first step that fits, and what is sampled."""
        for step in self.steps:
            found = re.search(step.after, new)
            if found and re.search(step.within, prompt):
                return step, step.text.replace("$1", found[1]) if found.re.groups else step.text
        return None, self.otherwise


class ScriptedEngine(FakeVllm):
    """An engine that serves a script; the first step that fits a prompt decides."""

    max_model_len = 65_536

    def __init__(self, model: TinyModel, script: Script, *, port: int = 0) -> None:
        self.script = script
        super().__init__(model, port=port)

    def _next_reply(self, prompt: list[int], max_tokens: int | None) -> Reply:
        if max_tokens == 1:  # a probe
            return super()._next_reply(prompt, max_tokens)
        text = self.model.reference.decode(prompt, skip_special_tokens=False)
        new = _new_messages(text)
        script = self.script
        with script.lock:
            step, answer = script.choose(new, text)
            fault: dict[str, Any] = {}
            if step is not None:
                fault = dict(enumerate(step.faults)).get(script.counts[step], {})
                script.counts[step] += 1
            reply = replace(_reply(self.model, answer), **fault)
            if reply.error is None:
                script.sampled.append(Sampled(step, prompt, reply.ids, new, _sent(reply)))
        return reply


def _sent(reply: Reply) -> tuple[int, ...]:
    """The ids that come before the event at which an answer breaks or is held; event 0 has none."""
    stops = [max(at - 1, 0) for at in (reply.break_at, reply.hold_at) if at is not None]
    return reply.ids[: min(stops)] if stops else reply.ids


def _new_messages(prompt: str) -> str:
    """The messages after the last one of the model, before the generation prompt."""
    history = prompt.removesuffix(_ASSISTANT)
    _, answered, last = history.rpartition(_ASSISTANT)
    return last.partition("<|im_end|>")[2] if answered else history


def _reply(model: TinyModel, text: str) -> Reply:
    """The sampling of a text, streamed as vLLM's parser of Hermes calls streams it."""
    starts = range(0, len(text), _SAMPLED_CHARACTERS)
    ids = [token for at in starts for token in model.encode(text[at : at + _SAMPLED_CHARACTERS])]
    parsed = [_parsed(model.decode(ids[: i + 1])) for i in range(len(ids))]
    names = [f"chatcmpl-tool-{secrets.token_hex(16)}" for _ in parsed[-1][1]]
    deltas = [_delta(before, after, names) for before, after in pairwise([("", []), *parsed])]
    content, calls = parsed[-1]
    message: dict[str, Any] = {"content": content or None}
    if calls:
        message["tool_calls"] = [
            {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}
            for name, (function, arguments) in zip(names, calls, strict=True)
        ]
    finish = "tool_calls" if calls else "stop"
    return Reply((*ids, END), message=message, deltas=(*deltas, {}), finish=finish)


def _parsed(text: str) -> _Parsed:
    """The content of a text, and name and arguments of its calls, without an end that may become syntax."""
    content, *bodies = text.split(_OPENED)
    calls = []
    for body in bodies:
        if (head := _CALL.match(body)) is not None:
            arguments, closed, _ = body[head.end() :].partition(_CLOSED)
            calls.append((head[1], arguments if closed else _without(_CLOSED, arguments)))
    return content if bodies else _without(_OPENED, content), calls


def _without(syntax: str, text: str) -> str:
    """A text without an end that begins the syntax."""
    held = max((n for n in range(1, len(syntax)) if text.endswith(syntax[:n])), default=0)
    return text[: len(text) - held]


def _delta(before: _Parsed, after: _Parsed, names: Sequence[str]) -> dict[str, Any]:
    """What a token adds."""
    delta: dict[str, Any] = {}
    if len(after[0]) > len(before[0]):
        delta["content"] = after[0][len(before[0]) :]
    calls = []
    for index, (name, arguments) in enumerate(after[1]):
        if index >= len(before[1]):
            function = {"name": name, "arguments": arguments}
            calls.append({"index": index, "id": names[index], "type": "function", "function": function})
        elif len(arguments) > len(before[1][index][1]):
            function = {"arguments": arguments[len(before[1][index][1]) :]}
            calls.append({"index": index, "function": function})
    if calls:
        delta["tool_calls"] = calls
    return delta
