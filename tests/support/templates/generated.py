"""Chat templates that no model has, put together from parts, and cells that their own renderings judge.

The rendering of a whole conversation, tokenised as an engine does it, begins with the prompt and a turn that
a model may have sampled. What follows there must be appended:

    sampled ids + appended ids == ids of the whole rendering

A second rendering with two characters around the close of each turn shows where the turn ends. A stop token
that the template does not print stands in place of the close, or between the turn and the next message.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from chat_tokenizer import ChatTokenizer, TokenizationError
from chat_tokenizer.encoder import Encoder
from tests.support.templates.shapes import (
    ANSWERED,
    CALLED,
    NEXT,
    SYSTEM,
    TOOLS,
    Message,
    assistant,
    call,
    result,
    user,
)
from tests.support.templates.vocabularies import VOCABULARIES

_BEGIN, _END = "\ue000", "\ue001"
_EOS, _OTHER, _LAST = "</s>", "<|other|>", "<|return|>"
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
_SPECIAL = (
    *("<unk>", "<s>", _EOS, _OTHER, _LAST, "<|start|>", "<|end|>", "<|done|>", "<|called|>", "<|bos|>"),
    *("<|sep|>", *_ROLES),
)
_PLAIN = ("<call>", "</call>")
_TOKEN = re.compile("|".join(map(re.escape, _SPECIAL)))
_HEADERS = {
    "shared": "'<|start|>' + %s",
    "role": "'<|' + %s + '|>'",
    "text": "%s + ':'",
    "instruction": "('[/INST] ' if %s == 'assistant' else '<s>[INST] ')",
    "close": "'<|end|>' + %s + '<|sep|>'",
}
_TWO_CALLS = assistant("", tool_calls=[call(1, "Bern"), call(2, "Oslo")])
_CONVERSATIONS: dict[str, tuple[list[Message], list[Message]]] = {
    "content": (ANSWERED, [NEXT]),
    "after system": ([SYSTEM, *ANSWERED], [NEXT, user("newer")]),
    "second turn": ([*ANSWERED, user("So?"), assistant("Yes é")], [NEXT]),
    "call": (CALLED, [result(1, "newsun")]),
    "content and call": ([user("Hi"), {**CALLED[-1], "content": "I look."}], [result(1, "newsun"), NEXT]),
    "two calls": ([*ANSWERED, user("And?"), _TWO_CALLS], [result(1, "newsun"), result(2, "newrain")]),
}


@dataclass(frozen=True)
class Recipe:
    """The parts of a chat template, and the kind of its vocabulary."""

    vocabulary: str
    own: str
    """A message of its own before the first one: `always`, `without system` or empty."""
    header: str
    """What opens messages; `close`: the token that mostly closes them."""
    after_header: str
    trims: bool
    """Whether it prints content without white space around it."""
    space: str
    """The text between a turn and its close."""
    number: str
    """An expression for a number between that text and the close; may be empty."""
    close: str
    closed: str
    """Which messages have a close: `all`, those of the `assistant`, those `between` others; or all, and the
    last one ends with another token (`last differs`)."""
    eos_between: bool
    """Whether EOS follows the close of an assistant's message unless that is the last one."""
    separator: str
    separated: bool
    """Whether the separator follows the last message too."""
    prompts: bool
    """Whether it reads `add_generation_prompt`; if not, it prints no prompt."""
    calls: str
    after_call: str
    call_close: str
    """What closes turns with calls; empty for the close of other turns."""
    opener_stops: bool
    """Whether the tokens of user and tool messages end turns of the model."""

    def source(self, begin: str = "", end: str = "") -> str:
        """The template, with texts to print around the close of each assistant message."""
        eos = "{% if not loop.last %}" + _shown(_EOS) + "{% endif %}" if self.eos_between else ""
        call_close = self.call_close or self.close
        close = (
            "{% if m.tool_calls %}" + _shown(call_close) + "{% else %}" + _shown(self.close) + "{% endif %}"
        )
        others = "" if self.closed == "assistant" else _shown(self.close)
        if self.closed == "between":
            close = "{% if not loop.last %}" + close + "{% endif %}"
        elif self.closed == "last differs":
            close = "{% if loop.last %}" + _shown(_LAST) + "{% else %}" + close + "{% endif %}"
        number = "{{ '#' ~ (" + self.number + ") }}" if self.number else ""
        separator = _shown(self.separator)
        if not self.separated:
            separator = "{% if not loop.last %}" + separator + "{% endif %}"
        own = self._header("'system'") + _shown("Be good.") + others
        if self.own == "without system":
            own = "{% if messages[0].role != 'system' %}" + own + "{% endif %}"
        return "".join(
            [
                _shown("<|bos|>"),
                own if self.own else "",
                "{% for m in messages %}",
                self._header("m.role"),
                "{{ m.content | trim }}" if self.trims else "{{ m.content }}",
                "{% if m.role == 'assistant' %}",
                *(self._calls(begin), "{% if not m.tool_calls %}", _shown(begin), "{% endif %}"),
                *(_shown(self.space), number, close, eos, _shown(end)),
                "{% else %}",
                others,
                "{% endif %}",
                separator,
                "{% endfor %}",
                "{% if add_generation_prompt %}" + self._header("'assistant'") + "{% endif %}"
                if self.prompts
                else "",
            ]
        )

    def _header(self, role: str) -> str:
        return "{{ " + _HEADERS[self.header] % role + " }}" + _shown(self.after_header)

    def _calls(self, begin: str) -> str:
        before, after = ("<call>", "</call>") if self.calls == "tokens" else ("CALL ", "")
        return (
            "{% for c in m.tool_calls or [] %}"
            + _shown(before)
            + "{{ c.function.arguments | tojson }}"
            + _shown(after)
            + "{% if loop.last %}"
            + _shown(begin)
            + "{% endif %}"
            + _shown(self.after_call)
            + "{% endfor %}"
        )

    @property
    def stops(self) -> list[str]:
        """The tokens that end turns of the model.

        One that closes turns with calls only is always among them: else it is syntax of calls, as far as
        renderings show, and no text of a turn that was cut off before it is judged.
        """
        of_all, of_calls = (_TOKEN.findall(close)[-1:] for close in (self.close, self.call_close))
        openers = ["<|user|>", "<|tool|>"] if self.opener_stops and self.header == "role" else []
        last = [_LAST] if self.closed == "last differs" else []
        only_calls = [] if self.eos_between and of_calls == of_all else of_calls
        return [_EOS, _OTHER, *last, *openers, *only_calls, *([] if self.eos_between else of_all)]


def _shown(text: str) -> str:
    return "{{ " + repr(text) + " }}" if text else ""


_BLANKS = st.sampled_from(["", "", "", " ", "\n", "\n\n", "  ", "      "])
RECIPES = st.builds(
    Recipe,
    vocabulary=st.sampled_from(list(VOCABULARIES)),
    own=st.sampled_from(["", "", "always", "without system"]),
    header=st.sampled_from([*list(_HEADERS)[:-1] * 2, "close"]),
    after_header=st.sampled_from(["", "\n", " "]),
    trims=st.booleans(),
    space=st.one_of(_BLANKS, st.sampled_from(["END", " END", "\nEND"])),
    number=st.sampled_from([*[""] * 17, "loop.index", "messages | length", "(m.tool_calls or []) | length"]),
    close=st.sampled_from(["<|end|>", "<|end|>", _EOS, "<|done|><|end|>", "<|done|>\n<|end|>", ""]),
    closed=st.sampled_from(["all", "all", "assistant", "between", "last differs"]),
    eos_between=st.booleans(),
    separator=_BLANKS,
    separated=st.booleans(),
    prompts=st.booleans(),
    calls=st.sampled_from(["tokens", "text"]),
    after_call=_BLANKS,
    call_close=st.sampled_from(["", "", "<|called|>"]),
    opener_stops=st.booleans(),
)
"""Any recipe."""


@dataclass(frozen=True)
class Cell:
    """A sampled turn, and the ids that follow it in the rendering of the whole conversation."""

    conversation: str
    ending: str
    sampled: list[int]
    expected: list[int] | None
    """None if the rendering does not show it: then `append` must refuse."""
    finish_reason: str = "stop"
    stop_reason: str | None = None


@dataclass(frozen=True)
class Generated:
    """A generated template with its tokenizer."""

    recipe: Recipe

    @cached_property
    def subject(self) -> ChatTokenizer:
        """The tokenizer under test."""
        backend = VOCABULARIES[self.recipe.vocabulary]()
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
        backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in _PLAIN])
        fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=_EOS)
        fast.chat_template = self.recipe.source()
        stops = (backend.token_to_id(stop) for stop in self.recipe.stops)
        stop_ids = frozenset(stop for stop in stops if stop is not None)
        return ChatTokenizer("generated", len(fast), fast, Encoder(backend.to_str()), stop_ids)

    @cached_property
    def _annotated(self) -> ChatTokenizer:
        fast = self.subject._tokenizer.__class__(tokenizer_object=self.subject._tokenizer.backend_tokenizer)
        fast.chat_template = self.recipe.source(_BEGIN, _END)
        return ChatTokenizer("annotated", len(fast), fast, self.subject._encoder)

    def cells(self) -> Iterator[Cell]:
        """Every way in which the last turn of each conversation may end."""
        for name, (history, new) in _CONVERSATIONS.items():
            annotated = self._annotated.text([*history, *new], tools=TOOLS)
            before, _, after = annotated.rpartition(_BEGIN)
            close, _, rest = after.partition(_END)
            before = before.replace(_BEGIN, "").replace(_END, "")
            assert before + close + rest == self.subject.text([*history, *new], tools=TOOLS)
            for ending, sampled, whole, how in self._endings("call" in name, before, close, rest):
                ids, whole_ids = self.subject.encode(sampled), self.subject.encode(whole)
                # where the tokenizer merges the sampled text with what follows, no ids are shown
                if not whole or whole_ids[: len(ids)] == ids:
                    yield Cell(name, ending, ids, whole_ids[len(ids) :] if whole else None, **how)

    def _endings(
        self, in_call: bool, before: str, close: str, rest: str
    ) -> Iterator[tuple[str, str, str, dict[str, str]]]:
        """The sampled text, and the rendering that begins with it."""
        whole, stops, tokens = before + close + rest, self.recipe.stops, list(_TOKEN.finditer(close))
        own = next((token for token in tokens if token.group() in stops), None)
        opener = _TOKEN.search(rest[: rest.index("new")])
        if self.recipe.closed == "last differs":
            start = tokens[0].start() if tokens else len(close)
            sampled = before + close[:start] + _LAST
            yield "own stop", sampled, sampled + rest, {}
        elif own is not None:
            yield "own stop", before + close[: own.end()], whole, {}
        elif opener is not None and opener.group() in stops:
            yield "own stop", before + close + rest[: opener.end()], whole, {}
        # where the template prints no close, white space after calls may precede the stop token or follow it
        shown = tokens or not in_call or not (close + rest)[:1].isspace()
        for stop in (_OTHER, _EOS):
            if stop == _OTHER or _EOS not in close:
                after = before + stop + (rest if tokens else close + rest)
                yield "other stop", before + stop, after if shown else "", {}
        yield "abort", before, whole, {"finish_reason": "abort"}
        blanks = len(close) - len(close.lstrip()) if in_call else 0
        for end in range(blanks + 1):
            yield "length", before + close[:end], whole, {"finish_reason": "length"}
        if len(tokens) > 1 and tokens[0] is not own:
            yield "length in close", before + close[: tokens[0].end()], whole, {"finish_reason": "length"}

    def judge(self, cell: Cell, *, history: bool = True) -> str:
        """`exact`, `refused`, `not shown` (and refused), or what is wrong."""
        messages, new = _CONVERSATIONS[cell.conversation]
        try:
            appended = self.subject.append(
                cell.sampled,
                new,
                history=messages if history else None,
                tools=TOOLS,
                finish_reason=cell.finish_reason,
                stop_reason=cell.stop_reason,
            )
        except TokenizationError:
            return "refused" if cell.expected is not None else "not shown"
        if cell.expected is None:
            return f"{cell.conversation}, {cell.ending}: answered, but the rendering does not show it"
        if appended.prompt_ids == cell.sampled + cell.expected:
            return "exact"
        texts = [
            self.subject.token_strings(ids)
            for ids in (appended.prompt_ids[len(cell.sampled) :], cell.expected)
        ]
        return f"{cell.conversation}, {cell.ending}: appended {texts[0]} instead of {texts[1]}"


def judge(recipe: Recipe, counts: Counter[str], *, proved: bool = False) -> None:
    """Judge every cell of a recipe, count the verdicts, and assert that none is wrong."""
    generated = Generated(recipe)
    if proved:
        generated.subject.prove()
    for cell in generated.cells():
        for history in (True, False) if proved else (True,):
            verdict = generated.judge(cell, history=history)
            counts[verdict] += 1
            assert verdict in ("exact", "refused", "not shown"), f"{verdict}\n{recipe.source()}\n{recipe}"
