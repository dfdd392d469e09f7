"""The matrix of corpus templates: template x conversation x ending x template arguments, with and without history.

A cell with an expected answer is exact, refused (a typed error) or wrong. Where the oracle has none, the cell is
excluded with its reason; `append` is called all the same and must raise a typed error, or answer what the template
prints for a simpler conversation. Any other answer breaks a law (wrong), or nothing can check it (unchecked).
"""

import copy
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.templates.conversations import (
    WITH_EVERY_ENDING,
    WITH_EVERY_VARIABLE,
    shapes_of,
    variables_of,
)
from tests.templates.corpus import CorpusTemplate
from tests.templates.endings import ENDINGS, Sampled, Turn
from tests.templates.engine import EngineRenderer, Renderer, TemplateRefuses
from tests.templates.generic_oracle import GenericOracle, Reason, TurnEnd, Undecided
from tests.templates.laws import Kind, broken_law, kind_of_difference
from tests.templates.matrix import Verdict
from tests.templates.shapes import ANSWER, SHAPES, TOOLS, Shape, assistant
from tests.templates.stand_in import OTHER_STOP, StandIn, stand_in
from tokenization import Appended, ChatTokenizer, TokenizationError

RendererFactory = Callable[[StandIn, CorpusTemplate], Renderer]
"""Makes the renderer of the oracle, for example one that asks a running engine."""


@dataclass(frozen=True)
class Result:
    """The verdict on one call of `append`."""

    source: str
    template: str
    shape: str
    ending: str
    variables: str
    history: bool
    """Whether `append` was given the history."""
    verdict: Verdict
    kind: str = ""
    """What is wrong, a `Kind`; or why the cell is excluded, a `Reason`."""
    detail: str = ""

    @property
    def cell(self) -> str:
        history = "with history" if self.history else "without history"
        return f"{self.template} | {self.shape} | {self.ending} | {self.variables} | {history}"


@dataclass(frozen=True)
class _Cell:
    shape: Shape
    ending: str
    variables: str


def plain_renderer(tokens: StandIn, template: CorpusTemplate) -> Renderer:
    return EngineRenderer(tokens.tokenizer, template.text)


@dataclass
class CorpusTrial:
    """Runs all cells of one template."""

    template: CorpusTemplate
    tokens: StandIn
    oracle: GenericOracle
    subject: ChatTokenizer
    """The tokenizer under test."""
    stops: tuple[str, ...]
    """The stop tokens of the model."""
    shapes: list[Shape]
    variables: dict[str, dict[str, Any]]
    _turns: dict[tuple[str, str], "Turn | Undecided"] = field(default_factory=dict)

    @classmethod
    def start(
        cls, template: CorpusTemplate, folder: Path, make_renderer: RendererFactory = plain_renderer
    ) -> "CorpusTrial":
        """Make a tokenizer for the template, write it to a folder, and load it from there.

        Raises:
            Undecided: the template prints no chat.
        """
        tokens = _tokens_of(template)
        renderer = make_renderer(tokens, template)
        oracle = GenericOracle(renderer, tokens.tokenizer, _reads_generation_prompt(template, renderer))
        stops = _stops(oracle, tokens)
        if "eos_token" not in template.variables:
            # most models sample EOS at the end of a turn
            tokens = replace(tokens, eos=stops[0])
            tokens.tokenizer.eos_token = stops[0]
        tokens.tokenizer.save_pretrained(folder)
        config = {"eos_token_id": [tokens.id_of(stop) for stop in stops]}
        (folder / "generation_config.json").write_text(json.dumps(config))
        subject = ChatTokenizer.load(folder)
        return cls(template, tokens, oracle, subject, stops, shapes_of(template), variables_of(template))

    def cells(self) -> Iterator[_Cell]:
        for shape in self.shapes:
            for variables in self.variables if shape.name in WITH_EVERY_VARIABLE else ["none"]:
                every = variables == "none" and shape.name in WITH_EVERY_ENDING
                for ending in ENDINGS if every else ["own stop", "length"]:
                    yield _Cell(shape, ending, variables)

    def results(self) -> list[Result]:
        before = repr((SHAPES, TOOLS))
        results = [result for cell in self.cells() for result in self._results(cell)]
        assert repr((SHAPES, TOOLS)) == before, "append changed the messages or tools it was given"
        return results

    def _results(self, cell: _Cell) -> list[Result]:
        """The verdicts with and without history."""
        turn = self._turn(cell.shape, cell.variables)
        if isinstance(turn, Undecided):
            return self._excluded(cell, turn)
        try:
            sampled = ENDINGS[cell.ending](turn)
        except Undecided as undecided:
            return self._excluded(cell, undecided)
        ids = self._ids(turn, sampled, cell)
        results = []
        for history in (True, False):
            appended, error = self._append(cell, sampled, ids, history)
            verdict, kind, detail = Verdict.EXACT, "", ""
            if appended is None:
                verdict, kind, detail = error
            elif found := self._difference(cell, turn, sampled, ids, appended):
                verdict, (kind, detail) = Verdict.WRONG, found
            results.append(self._result(cell, history, verdict, kind, detail))
        return results

    def _excluded(self, cell: _Cell, undecided: Undecided) -> list[Result]:
        """The verdicts on a cell without an expected answer."""
        turns = self._simpler(cell)
        sampled = [ENDINGS[cell.ending](turn) for turn in turns]
        first = sampled[0] if sampled else self._unknown(cell)
        ids = self._ids(turns[0], first, cell) if turns else self._plain_ids(cell, first)
        first = replace(first, history=cell.shape.history)
        results = []
        for history in (True, False):
            appended, error = self._append(cell, first, ids, history)
            verdict, kind, detail = Verdict.EXCLUDED, str(undecided.reason), ""
            if appended is None:
                if error[0] is Verdict.WRONG:
                    verdict, kind, detail = error
            else:
                verdict, kind, detail = self._check_laws(cell, undecided.reason, ids, appended, sampled)
            results.append(self._result(cell, history, verdict, kind, detail))
        return results

    def _check_laws(
        self, cell: _Cell, reason: Reason, ids: list[int], appended: Appended, sampled: list[Sampled]
    ) -> tuple[Verdict, str, str]:
        text = self.oracle.decode(appended.prompt_ids[len(ids) :])
        detail = f"appended {text!r}"
        if error := _malformed(appended, ids):
            return Verdict.WRONG, str(error), detail
        if law := broken_law(cell.shape, text):
            if law is Kind.NEW_MISSING and reason is Reason.NEW_NOT_PRINTED:
                law = Kind.NEW_DROPPED
            return Verdict.WRONG, str(law), f"{detail}; {reason}"
        new_ids = appended.prompt_ids[len(ids) :]
        if any(new_ids == simpler.expected for simpler in sampled) or appended.notes:
            return Verdict.EXCLUDED, str(reason), ""
        shown = [self.oracle.decode(simpler.expected) for simpler in sampled]
        return Verdict.UNCHECKED, str(reason), f"{detail}; simpler conversations show {shown}"

    def _difference(
        self, cell: _Cell, turn: Turn, sampled: Sampled, ids: list[int], appended: Appended
    ) -> tuple[str, str] | None:
        """Kind and description of the first error in an answer."""
        if error := _malformed(appended, ids):
            return str(error), ""
        new_ids = appended.prompt_ids[len(ids) :]
        if new_ids == sampled.expected:
            return None
        text, expected = self.oracle.decode(new_ids), self.oracle.decode(sampled.expected)
        kind = kind_of_difference(cell.shape, cell.ending, text, expected, self.stops, turn.end.tail)
        shown = f"{new_ids} instead of {sampled.expected}" if text == expected else ""
        return str(kind), shown or f"appended {text!r} instead of {expected!r}"

    def _append(
        self, cell: _Cell, sampled: Sampled, ids: list[int], history: bool
    ) -> tuple[Appended | None, tuple[Verdict, str, str]]:
        """The answer; or None, and the verdict on the error."""
        kwargs = dict(self.variables[cell.variables])
        try:
            appended = self.subject.append(
                list(ids),
                cell.shape.new,
                history=sampled.history if history else None,
                tools=TOOLS if cell.shape.with_tools else None,
                finish_reason=sampled.finish_reason,
                stop_reason=sampled.stop_reason(self.tokens.eos, self.tokens.id_of),
                add_generation_prompt=kwargs.pop("add_generation_prompt", True),
                template_kwargs=kwargs,
            )
        except TokenizationError as error:
            return None, (Verdict.REFUSED, type(error).__name__, str(error))
        except Exception as error:  # noqa: BLE001 - the boundary: an untyped error is a finding, not a crash
            return None, (Verdict.WRONG, Kind.UNTYPED_ERROR, repr(error))
        return appended, (Verdict.EXACT, "", "")

    def _turn(self, shape: Shape, variables: str) -> "Turn | Undecided":
        key = (shape.name, variables)
        if key not in self._turns:
            kwargs = self.variables[variables]
            try:
                end = self.oracle.turn_end(shape, kwargs)
                self._turns[key] = Turn(self.oracle, shape, kwargs, end, OTHER_STOP)
            except Undecided as undecided:
                self._turns[key] = undecided
        return self._turns[key]

    def _simpler(self, cell: _Cell) -> list[Turn]:
        """Turns of simpler conversations that the template prints: less history, or no call."""
        shape, turns = cell.shape, []
        answered = [*shape.history[:-1], assistant(ANSWER)]
        for history in (_shortest(shape.history), answered, _shortest(answered)):
            simpler = replace(shape, name=f"{shape.name}, simpler", history=history)
            try:
                end = self.oracle.turn_end(simpler, self.variables[cell.variables])
                turn = Turn(self.oracle, simpler, self.variables[cell.variables], end, OTHER_STOP)
                ENDINGS[cell.ending](turn)
                turns.append(turn)
            except Undecided:
                continue
        return turns

    def _unknown(self, cell: _Cell) -> Sampled:
        """A turn of which nothing is known but how it ended."""
        text = json.dumps(cell.shape.history[-1], ensure_ascii=False)
        if cell.ending in ("own stop", "other stop"):
            stop = OTHER_STOP if cell.ending == "other stop" else self.stops[0]
            return Sampled(cell.shape.history, text + stop, [], stop_token=stop)
        reason = {"stop string": "stop"}.get(cell.ending, cell.ending)
        stop_string = text[-3:] if cell.ending == "stop string" else ""
        return Sampled(cell.shape.history, text, [], reason, stop_string=stop_string)

    def _ids(self, turn: Turn, sampled: Sampled, cell: _Cell) -> list[int]:
        prompt = self.oracle.encode(self.oracle.prompt(turn.shape, turn.kwargs))
        return prompt + self._sampled_ids(sampled.text, repr(cell))

    def _plain_ids(self, cell: _Cell, sampled: Sampled) -> list[int]:
        return self._sampled_ids(sampled.text, repr(cell))

    def _sampled_ids(self, text: str, seed: str) -> list[int]:
        """Ids of a text other than those the tokenizer chooses; equal for equal seeds."""
        rng = random.Random(seed)
        ids: list[int] = []
        end = 0
        for token in [*self.oracle.added_tokens.finditer(text), None]:
            chunk = text[end : token.start()] if token else text[end:]
            while chunk:
                size = rng.randint(1, 6)
                ids += self.oracle.encode(chunk[:size])
                chunk = chunk[size:]
            if token:
                ids += self.oracle.encode(token.group())
                end = token.end()
        return ids

    def _result(self, cell: _Cell, history: bool, verdict: Verdict, kind: str, detail: str) -> Result:
        where = (self.template.source, self.template.name, cell.shape.name, cell.ending, cell.variables)
        return Result(*where, history, verdict, kind, detail)


def _malformed(appended: Appended, ids: list[int]) -> Kind | None:
    if appended.prompt_ids[: len(ids)] != ids:
        return Kind.PREFIX
    if appended.prompt_ids[len(ids) :] != [*appended.close_ids, *appended.suffix_ids]:
        return Kind.SUM
    return None


def _shortest(history: list[Any]) -> list[Any]:
    """The last user message and the turn."""
    users = [message for message in history[:-1] if message["role"] == "user"]
    return copy.deepcopy([*users[-1:], history[-1]])


def _tokens_of(template: CorpusTemplate) -> StandIn:
    """A tokenizer with the tokens in the template's text and in what it prints."""
    tokens = stand_in(template)
    renderer = EngineRenderer(tokens.tokenizer, template.text)
    renderings = []
    for shape in SHAPES[:16]:
        try:
            tools = TOOLS if shape.with_tools else None
            messages = [*shape.history, *shape.new]
            renderings.append(renderer.render(messages, tools, {"add_generation_prompt": True}))
        except TemplateRefuses:
            continue
    return stand_in(template, renderings)


def _reads_generation_prompt(template: CorpusTemplate, renderer: Renderer) -> bool:
    messages = [{"role": "user", "content": "Hi"}]
    try:
        texts = {renderer.render(messages, None, {"add_generation_prompt": on}) for on in (True, False)}
    except TemplateRefuses:
        return "add_generation_prompt" in template.variables
    return len(texts) > 1


def _stops(oracle: GenericOracle, tokens: StandIn) -> tuple[str, ...]:
    """The stop tokens that turns of common conversations end with, EOS, and one that no template prints."""
    found: list[str] = []
    for shape in SHAPES:
        try:
            end: TurnEnd = oracle.turn_end(shape, {})
        except Undecided:
            continue
        found += [end.sampled_stop, *([end.stop] if end.close else [])]
    return tuple(dict.fromkeys([*found, tokens.eos, OTHER_STOP]))


def verdicts(results: list[Result], *, history: bool) -> Mapping[Verdict, int]:
    """Number of cells by verdict, with or without history."""
    counts = dict.fromkeys(Verdict, 0)
    for result in results:
        if result.history is history:
            counts[result.verdict] += 1
    return counts
