"""Proves how much of a conversation decides what a template prints after a turn.

A smaller context may stand for the real history only where that was shown. The proof is differential: the
template is rendered after histories that hold every string that its source compares with, more messages than
its largest number, repeated, re-ordered and missing results, each role, tools and template arguments
(`tokenization.histories`). Where the text after the turn is the same as after the smaller context, every time,
the template is local.

What the proof does not try is left to the audit, which compares a share of the appends with the whole
rendering.
"""

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import Any

from tokenization.histories import PRINCIPAL_STEPS, Messages, Step, steps, structures, user, with_string
from tokenization.messages import Message
from tokenization.syntax import Syntax
from tokenization.turns import RenderOptions, placeholder_context, turn_context

PROOF_VERSION = 1
"""Part of the key of a stored proof. Raise it when the proof changes."""
MAX_SECONDS = 10.0
"""CPU time after which a template counts as not local. Most proofs take less than one second."""
_MAX_STRINGS = 150
_MAX_NUMBER = 128
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "alpha",
            "description": "Tells.",
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
        },
    }
]


class Locality(StrEnum):
    """What decides the text after a turn."""

    NEW = "new messages"
    """The new messages alone."""
    TURN = "last turn"
    """The new messages and the last turn: its tool calls, and which kinds of content it has."""
    HISTORY = "whole history"
    """Possibly more of the history; also where nothing was proved."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What was proved of a template."""

    after_results: Locality
    """What decides the text where the new messages begin with tool results."""
    after_messages: Locality
    """What decides it where they begin with another message."""
    reason: str = ""
    """What depends on more than the new messages; empty if nothing does."""

    def locality(self, new: Sequence[Message]) -> Locality:
        """What decides the text after a turn that these messages follow."""
        results = bool(new) and new[0].get("role") == "tool"
        return self.after_results if results else self.after_messages


NOT_LOCAL = Proof(Locality.HISTORY, Locality.HISTORY)

TailOf = Callable[[Sequence[Message], Sequence[Message], RenderOptions], Hashable | None]
"""What follows the last turn of a context, given the new messages; None where the template refuses them."""
_Case = tuple[Messages, Step, RenderOptions]


def prove(tail_of: TailOf, syntax: Syntax) -> Proof:
    """Find out what decides the text after a turn. Takes up to `MAX_SECONDS` of CPU time, mostly below one."""
    if len(syntax.strings) > _MAX_STRINGS:
        return _not_local(f"its source compares with {len(syntax.strings)} strings, too many to try")
    if max(syntax.numbers, default=0) > _MAX_NUMBER:
        return _not_local(f"its source compares with {max(syntax.numbers)}, too large to try")
    return _Prover(tail_of).prove(_cases(syntax))


class _Prover:
    def __init__(self, tail_of: TailOf) -> None:
        self._tail_of = tail_of
        self._local: dict[object, Hashable | None] = {}
        self._found = {True: Locality.NEW, False: Locality.NEW}
        self._reasons: dict[bool, str] = {}

    def prove(self, cases: Iterator[_Case]) -> Proof:
        began = time.thread_time()
        for history, step, options in cases:
            if time.thread_time() - began > MAX_SECONDS:
                return _not_local(f"the proof was not complete after {MAX_SECONDS:.0f} s")
            self._compare(history, step, options)
            if all(locality is Locality.HISTORY for locality in self._found.values()):
                break
        return Proof(self._found[True], self._found[False], "; ".join(self._reasons.values()))

    def _compare(self, history: Messages, step: Step, options: RenderOptions) -> None:
        results = step.after_results
        if self._found[results] is Locality.HISTORY:
            return
        real = self._tail_of([*history, step.turn], step.new, options)
        if real is None:
            return
        in_turn = self._memo(turn_context(step.turn), step.new, options)
        if in_turn is not None and in_turn != real:
            self._found[results] = Locality.HISTORY
            self._reasons[results] = _reason("more than the last turn", history, step, options)
        elif self._found[results] is Locality.NEW:
            alone = self._memo(placeholder_context(step.new), step.new, options)
            if alone is not None and alone != real:
                self._found[results] = Locality.TURN
                self._reasons[results] = _reason("the last turn", history, step, options)

    def _memo(self, context: list[dict[str, Any]], new: Messages, options: RenderOptions) -> Hashable | None:
        key = repr((context, new, options))
        if key not in self._local:
            self._local[key] = self._tail_of(context, new, options)
        return self._local[key]


def _cases(syntax: Syntax) -> Iterator[_Case]:
    plain = RenderOptions(None, True, {})
    every_step, every_structure = list(steps(syntax)), list(structures(syntax))
    for step in every_step:
        yield [user()], step, plain
    for history in every_structure:
        for step in every_step[: len(every_step) - 4 * len(syntax.strings)]:
            yield history, step, plain
    with_strings = [history for string in syntax.strings for history in with_string(string)]
    for options in _options(syntax):
        for history in chain(every_structure, with_strings if _plain(options) else ()):
            for step in PRINCIPAL_STEPS:
                yield history, step, options


def _options(syntax: Syntax) -> Iterator[RenderOptions]:
    """Without and with tools, without generation prompt, and with each template argument."""
    yield RenderOptions(None, True, {})
    yield RenderOptions(_TOOLS, True, {})
    yield RenderOptions(None, False, {})
    for name in syntax.kwargs:
        for value in (True, False, "low"):
            yield RenderOptions(_TOOLS, True, {name: value})


def _plain(options: RenderOptions) -> bool:
    return options.add_generation_prompt and not options.kwargs


def _not_local(reason: str) -> Proof:
    return Proof(Locality.HISTORY, Locality.HISTORY, reason)


def _reason(what: str, history: Messages, step: Step, options: RenderOptions) -> str:
    kwargs: Mapping[str, Any] = options.kwargs
    setting = "".join(f" with {name}={value!r}" for name, value in kwargs.items())
    followed = ", ".join(message["role"] for message in step.new)
    return f"{what} decides what follows{setting}: {followed} after {_shown([*history, step.turn])}"


def _shown(messages: Messages, limit: int = 160) -> str:
    texts = []
    for message in messages:
        content = message["content"] if isinstance(message["content"], str) else ""
        calls = " with calls" if message.get("tool_calls") else ""
        texts.append(f"{message['role']}{calls} {content[:24]!r}")
    shown = ", ".join(texts)
    return shown if len(shown) <= limit else shown[:limit] + "..."
