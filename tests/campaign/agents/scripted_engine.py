"""A fake engine whose model works on a task: what it samples follows from the text of its prompt.

It renders with the chat template of the demo and a part of the demo's vocabulary, samples ids that no
tokenizer gives for their text, and streams tool calls as vLLM's parser of Hermes notation does.
"""

import json
import re
import secrets
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.fake_vllm import FakeVllm, Reply
from tests.support.templates.vocabularies import smollm2_merges
from tests.support.tiny_model import END, SPECIAL_TOKENS, TinyModel, save_model
from tokenproxy.demo.checkpoint import TEMPLATE_FILE

_ASSISTANT = "<|im_start|>assistant\n"
_SAMPLED_CHARACTERS = 5
"""Characters that are encoded alone: the ids of an answer are not those of a tokenizer."""

Call = tuple[str, dict[str, Any]]
"""Name and arguments of a tool call."""


def make_task_model(folder: Path) -> TinyModel:
    """The demo's chat template over the first tokens of the demo's vocabulary."""
    vocab, merges = smollm2_merges()
    tokens = [*SPECIAL_TOKENS, *sorted(vocab, key=vocab.__getitem__)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return save_model(folder, tokenizer, TEMPLATE_FILE.read_text(), len(tokens))


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What the model samples after a prompt whose last messages match."""

    after: str
    """A pattern that is searched in the messages after the last one of the model."""
    text: str = ""
    calls: tuple[Call, ...] = ()
    """In their arguments, `$1` stands for the first group of `after`."""
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
    """Those of `ids` that were sent as a stream: fewer if the answer was scripted to break."""
    reply: Reply

    def after(self, prompt: list[int]) -> Reply | None:
        """What is left of it for a prompt that ends with its first ids; None for another prompt."""
        begun = tuple(prompt[len(self.prompt) :])
        count = len(begun)
        if not begun or prompt[: len(self.prompt)] != self.prompt or self.ids[:count] != begun:
            return None
        return replace(self.reply, ids=self.ids[count:], deltas=self.reply.deltas[count:], break_at=None)


@dataclass
class Script:
    """The steps of a task, and what was sampled by them."""

    steps: Sequence[Step]
    sampled: list[Sampled] = field(default_factory=list)
    resumed: int = 0
    """How many of them went on after they broke."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    _counts: Counter[Step] = field(default_factory=Counter)

    def sample(self, model: TinyModel, prompt: list[int]) -> Reply:
        """The reply of the first step that fits a prompt, with its next fault; or what is left of a reply."""
        for index, earlier in enumerate(self.sampled):
            if rest := earlier.after(prompt):
                self.sampled[index] = replace(earlier, sent=earlier.ids)
                self.resumed += 1
                return rest
        text = model.reference.decode(prompt, skip_special_tokens=False)
        new = _new_messages(text)
        for step in self.steps:
            if (found := re.search(step.after, new)) and re.search(step.within, text):
                fault = dict(enumerate(step.faults)).get(self._counts[step], {})
                self._counts[step] += 1
                reply = replace(_reply(model, step, found[1] if found.re.groups else ""), **fault)
                break
        else:
            step, reply = None, _reply(model, Step("", "Fine."), "")
        if reply.error is None:
            self.sampled.append(Sampled(step, prompt, reply.ids, new, _sent(reply), reply))
        return reply

    @property
    def cut(self) -> list[Sampled]:
        """The generations that were not sent to their end."""
        return [sampled for sampled in self.sampled if sampled.sent != sampled.ids]


class ScriptedEngine(FakeVllm):
    """An engine that serves a script."""

    max_model_len = 65_536

    def __init__(self, model: TinyModel, script: Script) -> None:
        self.script = script
        super().__init__(model)

    def _next_reply(self, prompt: list[int], max_tokens: int | None) -> Reply:
        if max_tokens == 1:  # a probe
            return super()._next_reply(prompt, max_tokens)
        with self.script.lock:
            return self.script.sample(self.model, prompt)


def _sent(reply: Reply) -> tuple[int, ...]:
    """The ids that come before the event at which an answer breaks; event 0 has none."""
    return reply.ids if reply.break_at is None else reply.ids[: max(reply.break_at - 1, 0)]


def _new_messages(prompt: str) -> str:
    """The messages after the last one of the model, before the generation prompt."""
    history = prompt.removesuffix(_ASSISTANT)
    _, answered, last = history.rpartition(_ASSISTANT)
    return last.partition("<|im_end|>")[2] if answered else history


def _reply(model: TinyModel, step: Step, group: str) -> Reply:
    """The sampling of a step."""
    sampled: list[tuple[str, dict[str, Any]]] = [(piece, {"content": piece}) for piece in _pieces(step.text)]
    calls: list[dict[str, Any]] = []
    for index, (name, values) in enumerate(step.calls):
        arguments = json.dumps(values).replace("$1", group)
        function = {"name": name, "arguments": arguments}
        call = {"id": f"chatcmpl-tool-{secrets.token_hex(16)}", "type": "function", "function": function}
        first = {"tool_calls": [{"index": index, **call, "function": {"name": name, "arguments": ""}}]}
        sampled += [(piece, {}) for piece in _pieces(f'<tool_call>\n{{"name": "{name}", "arguments":')]
        sampled.append((" ", first))
        for piece in _pieces(arguments):
            sampled.append((piece, {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}))
        sampled += [(piece, {}) for piece in _pieces("}\n</tool_call>\n")]
        calls.append(call)
    ids, deltas = [], []
    for piece, delta in sampled:
        of_piece = model.encode(piece)
        ids += of_piece
        deltas += [*[{}] * (len(of_piece) - 1), delta]
    message = {"content": step.text or None, **({"tool_calls": calls} if calls else {})}
    finish = "tool_calls" if calls else "stop"
    return Reply((*ids, END), message=message, deltas=(*deltas, {}), finish=finish)


def _pieces(text: str) -> list[str]:
    return [text[at : at + _SAMPLED_CHARACTERS] for at in range(0, len(text), _SAMPLED_CHARACTERS)]
