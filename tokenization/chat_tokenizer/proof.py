"""Proves which part of a conversation determines the text that a template prints after a turn.

A smaller context may replace the real history only if the result is proved to be the same. The proof compares
renderings: the template is rendered after histories that hold every string that its source compares with,
more messages than its numbers together, repeated, re-ordered and missing results, each role, tools and
template arguments (`chat_tokenizer.histories`). If the text after the turn always equals the text after the
smaller context, the template is local.

The audit covers cases that the proof does not test: it compares a share of the appends with renderings of the
whole history.
"""

import json
import logging
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import version
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

from chat_tokenizer.cache import digest
from chat_tokenizer.histories import (
    ANY_TOOLS,
    PRINCIPAL_STEPS,
    UNANSWERED,
    WORD,
    Messages,
    Step,
    lengths,
    long_steps,
    steps,
    steps_with_new_string,
    steps_with_strings,
    structures,
    user,
    with_fields,
    with_images,
    with_roles,
    with_string,
    with_strings,
    with_text,
)
from chat_tokenizer.messages import Message
from chat_tokenizer.renderer import Append, RenderOptions
from chat_tokenizer.syntax import Syntax
from chat_tokenizer.tails import Tails, TurnTail
from chat_tokenizer.turns import placeholder_context, turn_context

log = logging.getLogger("tokenproxy")
PROOF_VERSION = 9
"""Part of the key of a stored proof. Raise it when the proof changes."""
MAX_SECONDS = 30.0
"""CPU time in seconds after which a template counts as not local. Most proofs take less than 1 s."""
_MAX_STRINGS = 150
_MAX_NUMBER = 128
_NO_ARGUMENTS = {"type": "object", "properties": {}, "required": []}
_TWO_TOOLS = [
    *ANY_TOOLS,
    {"type": "function", "function": {"name": "omega", "description": "Asks.", "parameters": _NO_ARGUMENTS}},
]


class Locality(StrEnum):
    """The messages that determine the text after a turn."""

    NEW = "new messages"
    """The new messages alone."""
    NEW_AFTER_STOP = "new messages, after a stop token"
    """The new messages alone if a stop token ended the turn. How a turn that was cut off is closed depends on
    the turn too."""
    TURN = "last turn"
    """The new messages and the last turn: its tool calls, and which kinds of content it has."""
    HISTORY = "whole history"
    """Possibly more of the history; also if nothing was proved."""


@dataclass(frozen=True, slots=True)
class Proof:
    """The results of the proof about a template."""

    after_results: Locality
    """The messages that determine the text if the new messages begin with tool results."""
    after_messages: Locality
    """The messages that determine it if the new messages begin with another message."""
    reason: str = ""
    """The reason if more than the new messages determine it; empty otherwise."""
    complete: bool = True
    """Whether all histories were tested. If time ran out, another machine may prove more."""

    def demoted(self, new: Sequence[Message], reason: str) -> "Proof":
        """The proof with the text after such new messages marked as dependent on the whole history."""
        if _begins_with_result(new):
            return Proof(Locality.HISTORY, self.after_messages, reason)
        return Proof(self.after_results, Locality.HISTORY, reason)

    def and_refuted_in(self, other: "Proof") -> "Proof":
        """What both proofs allow."""
        order = list(Locality)
        results, messages = (
            max(pair, key=order.index)
            for pair in (
                (self.after_results, other.after_results),
                (self.after_messages, other.after_messages),
            )
        )
        if (results, messages) == (self.after_results, self.after_messages):
            return self
        return Proof(results, messages, other.reason, self.complete and other.complete)

    def locality(self, new: Sequence[Message]) -> Locality:
        """The messages that determine the text after a turn if these messages follow it."""
        return self.after_results if _begins_with_result(new) else self.after_messages


_Case = tuple[Messages, Step, RenderOptions]


def prove(tails: Tails, syntax: Syntax, max_seconds: float = MAX_SECONDS) -> Proof:
    """Prove which messages determine the text after a turn. Takes up to `max_seconds` of CPU time."""
    if not syntax.parsed:
        return _not_local("its source cannot be parsed")
    if len(syntax.strings) > _MAX_STRINGS:
        return _not_local(f"its source compares with {len(syntax.strings)} strings, too many to try")
    if sum(syntax.numbers) > _MAX_NUMBER:
        return _not_local(f"its source compares with numbers above {_MAX_NUMBER} together, too large to try")
    if syntax.untried:
        return _not_local(f"its source uses {', '.join(syntax.untried)}, whose results cannot all be tried")
    cases = _cases(syntax) if syntax.complete else _cases_without_source(syntax)
    return _Prover(tails, max_seconds).prove(cases)


class _Prover:
    def __init__(self, tails: Tails, max_seconds: float) -> None:
        self._tails = tails
        self._max_seconds = max_seconds
        self._in_turn: dict[str, TurnTail | None] = {}
        """The tail after the last turn alone, by step and options; None if the template refuses the turn."""
        self._tried: set[bool] = set()
        """Whether tool results come first in the steps that could be rendered without template arguments."""
        self._found = {True: Locality.NEW, False: Locality.NEW}
        self._reasons: dict[bool, str] = {}

    def prove(self, cases: Iterator[_Case]) -> Proof:
        began = time.thread_time()
        for history, step, options in cases:
            if time.thread_time() - began > self._max_seconds:
                reason = f"the proof was not complete after {self._max_seconds:.0f} s"
                return Proof(Locality.HISTORY, Locality.HISTORY, reason, complete=False)
            if self._found[step.after_results] is not Locality.HISTORY:
                self._compare(history, step, options)
            elif all(locality is Locality.HISTORY for locality in self._found.values()):
                break
        for after_results in self._found.keys() - self._tried:
            followed = "tool results" if after_results else "other messages"
            self._found[after_results] = Locality.HISTORY
            self._reasons[after_results] = f"the template refuses {followed} after a turn: nothing is proved"
        return Proof(self._found[True], self._found[False], "; ".join(self._reasons.values()))

    def _compare(self, history: Messages, step: Step, options: RenderOptions) -> None:
        key, tails = repr((step, options)), self._tails
        append = Append([*history, step.turn], step.new, options)
        if key not in self._in_turn:
            in_turn = self._in_turn[key] = tails.tail_in(append.after(turn_context(step.turn)))
            alone = tails.tail_in(append.after(placeholder_context(step.new)))
            if alone is not None:
                shown = in_turn or tails.tail_in(append)
                if shown is not None and not alone.appends_as(shown):
                    after_stop = alone.continues_as(shown)
                    locality = Locality.NEW_AFTER_STOP if after_stop else Locality.TURN
                    self._refute(locality, "the last turn decides", history, step, options)
            # without a marker too, because tails are found with a marker in the turn
            if in_turn is not None and not tails.holds(in_turn, append):
                self._refute(Locality.HISTORY, "the text of the turn decides", history, step, options)
        in_turn = self._in_turn[key]
        if in_turn is None:
            return
        if not options.kwargs:
            self._tried.add(step.after_results)
        if not tails.holds(in_turn, append, marked=True):
            self._refute(Locality.HISTORY, "earlier messages decide", history, step, options)

    def _refute(
        self, locality: Locality, what: str, history: Messages, step: Step, options: RenderOptions
    ) -> None:
        order = list(Locality)
        if order.index(locality) < order.index(self._found[step.after_results]):
            return
        self._found[step.after_results] = locality
        self._reasons[step.after_results] = _reason(what, history, step, options)


def _cases(syntax: Syntax) -> Iterator[_Case]:
    plain, with_tools = RenderOptions(), RenderOptions(ANY_TOOLS)
    two_steps, question = PRINCIPAL_STEPS[:2], [user()]
    every_structure = [*structures(), *lengths(syntax), *with_roles(syntax)]
    yield from product(with_fields(syntax), two_steps, [plain])
    for step in steps():
        yield from product([question, *every_structure], [step], [plain])
        # a template may refuse conversations without tools
        yield question, step, with_tools
    for history, step in with_images(syntax):
        yield history, step, plain
    yield from product([question], steps_with_strings(syntax), [plain])
    for string in syntax.strings:
        yield from product(with_string(string), two_steps, [plain])
        yield from product(with_text(string), two_steps, [with_tools])
        yield from product(with_text(WORD), steps_with_new_string(string), [plain])
    yield from product(with_strings(syntax), two_steps, [plain])
    yield from product(structures(), long_steps(syntax), [plain])
    without_prompt = [RenderOptions(tools, False) for tools in (None, ANY_TOOLS)]
    for options in (with_tools, RenderOptions(_TWO_TOOLS), *without_prompt):
        yield from product(every_structure, PRINCIPAL_STEPS, [options])
    for kwargs in _tried_kwargs(syntax):
        options = RenderOptions(ANY_TOOLS, True, kwargs)
        yield from product(structures(), two_steps, [options])
        yield from product([question], steps(), [options])
        # a string in the system message, or in the last one
        texts = chain.from_iterable(islice(with_text(string), 3) for string in syntax.strings)
        yield from product(chain(texts, lengths(syntax)), two_steps, [RenderOptions(None, True, kwargs)])


def _cases_without_source(syntax: Syntax) -> Iterator[_Case]:
    """Some hundred cases, for a renderer without a source, which takes milliseconds for each."""
    plain, with_tools = RenderOptions(), RenderOptions(ANY_TOOLS)
    two_steps, question = PRINCIPAL_STEPS[:2], [user()]
    every_structure = [*structures(), *lengths(syntax), *with_roles(syntax)]
    few = [question, *islice(structures(), 0, None, 5)]
    answering = [step for step in steps() if answers_calls(step.turn, step.new)]
    yield from product(few, answering, [plain, with_tools])
    yield from product(every_structure, PRINCIPAL_STEPS, [plain, with_tools])
    for string in syntax.strings:
        yield from product(with_text(string), two_steps, [with_tools])
    for kwargs in _tried_kwargs(syntax):
        options = RenderOptions(ANY_TOOLS, True, with_thinking(kwargs))
        yield from product(few, two_steps, [options])
        yield question, UNANSWERED, options


def _tried_kwargs(syntax: Syntax) -> Iterator[dict[str, object]]:
    """Each template argument alone, with each value that the proof tests."""
    return ({name: value} for name in syntax.kwargs for value in tried_values(syntax, name))


def answers_calls(turn: Message, new: Sequence[Message]) -> bool:
    """Whether each of the results after a turn answers a call of the turn or of a message before it."""
    known = set()
    for message in (turn, *new):
        known |= {call.get("id") for call in message.get("tool_calls") or ()}
        if message.get("role") == "tool" and message.get("tool_call_id") not in known:
            return False
    return True


def with_thinking(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with the one that vLLM sets from an effort of reasoning."""
    effort = kwargs.get("reasoning_effort")
    return {"enable_thinking": effort != "none", **kwargs} if isinstance(effort, str) else dict(kwargs)


def tried_values(syntax: Syntax, name: str) -> list[object]:
    """The values of a template argument that the proof tests."""
    return list(dict.fromkeys((True, False, *syntax.kwargs[name])))


def _begins_with_result(new: Sequence[Message]) -> bool:
    return bool(new) and new[0].get("role") == "tool"


def _not_local(reason: str) -> Proof:
    return Proof(Locality.HISTORY, Locality.HISTORY, reason)


def _reason(what: str, history: Messages, step: Step, options: RenderOptions) -> str:
    kwargs: Mapping[str, Any] = options.kwargs
    setting = "".join(f" with {name}={value!r}" for name, value in kwargs.items())
    followed = ", ".join(message["role"] for message in step.new)
    return f"{what} what is printed{setting}: {followed} after {_shown([*history, step.turn])}"


def _shown(messages: Messages, limit: int = 160) -> str:
    texts = []
    for message in messages:
        content = message["content"] if isinstance(message["content"], str) else ""
        calls = " with calls" if message.get("tool_calls") else ""
        texts.append(f"{message['role']}{calls} {content[:24]!r}")
    shown = ", ".join(texts)
    return shown if len(shown) <= limit else shown[:limit] + "..."


def proof_key(identity: bytes, added_ids: Mapping[str, int], stop_ids: Iterable[int]) -> str:
    """32 hexadecimal digits: a digest of all that a proof depends on.

    Args:
        identity: that of the renderer.
        added_ids: the id of each added token.
    """
    parts = (
        PROOF_VERSION,
        identity,
        sorted(added_ids.items()),
        sorted(stop_ids),
        [version(name) for name in ("jinja2", "transformers")],
    )
    return digest(*parts).hex()


def load_proof(folder: Path, key: str) -> Proof | None:
    """The stored proof of a key; None if there is none that can be read."""
    try:
        fields = json.loads((folder / f"{key}.json").read_text("utf-8"))
        return Proof(
            Locality(fields["after_results"]), Locality(fields["after_messages"]), str(fields["reason"])
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def store_proof(folder: Path, key: str, proof: Proof) -> None:
    """Store a proof. Refutations that another process stored in the meantime are kept.

    If the folder cannot be written, that is logged, and the next process makes the proof again.
    """
    stored = load_proof(folder, key)
    proof = proof if stored is None else proof.and_refuted_in(stored)
    content = {
        "after_results": str(proof.after_results),
        "after_messages": str(proof.after_messages),
        "reason": proof.reason,
    }
    temporary = None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # written to a temporary file and renamed, so that another process never reads half of a file
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, ensure_ascii=False)
        Path(temporary).replace(folder / f"{key}.json")
    except (OSError, ValueError) as error:
        log.warning("the results of examining a chat template cannot be stored in %s: %s", folder, error)
        if temporary is not None:
            with suppress(OSError):
                Path(temporary).unlink()
