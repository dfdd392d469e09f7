"""The matrix: template x conversation x ending x template arguments, each with and without history.

A cell with expected ids is exact, refused (a typed error) or wrong. In an exact cell

    appended.prompt_ids == prompt_ids + appended.close_ids + appended.suffix_ids

and the ids after `prompt_ids` are the expected ones. Where the oracle has none, the cell is excluded with its
reason, and `append` is called all the same: see `unshown`.
"""

import functools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from chat_tokenizer import Appended, ChatTokenizer, TokenizationError
from tests.support.templates import sampling
from tests.support.templates.conversations import shapes_of, variables_of
from tests.support.templates.oracle import Oracle, Reason, Undecided
from tests.support.templates.pairing import Pairing
from tests.support.templates.renderer import Renderer
from tests.support.templates.sampling import ENDINGS, Sampled, Turn, applies, sampled_ids
from tests.support.templates.shapes import SHAPES, TOOLS, Shape, user
from tests.support.templates.stand_in import StandIn
from tests.support.templates.unshown import Unshown
from tests.support.templates.verdicts import Finding, Kind, Result, Verdict, malformed

# conversations that end in every way, the others with their own stop token or by length
_WITH_EVERY_ENDING = ("content", "call", "reasoning", "parallel calls", "content and call")
_WITH_EVERY_VARIABLE = ("content", "call", "reasoning")


@dataclass(frozen=True)
class Cell:
    """A conversation, how its last turn ended (a key of `ENDINGS`), and the key of its template arguments."""

    shape: Shape
    ending: str
    variables: str


@dataclass
class Trial:
    """Runs all cells of one pairing. Cells share the renderings of the oracle."""

    pairing: Pairing
    tokens: StandIn
    oracle: Oracle
    subject: ChatTokenizer
    """The tokenizer under test."""
    stops: tuple[str, ...]
    """The stop tokens of the model."""
    shapes: list[Shape]
    variables: dict[str, dict[str, Any]]
    """The template arguments to try, by name."""

    @classmethod
    def start(cls, pairing: Pairing) -> "Trial":
        """Write the pairing's tokenizer to a folder and load it from there."""
        template, tokens = pairing.template, pairing.stand_in()
        renderer = Renderer(tokens.tokenizer)
        oracle = Oracle(renderer)
        stops = _stops(oracle, tokens)
        if tokens.eos_is_a_guess:
            tokens = replace(tokens, eos=stops[0])
            tokens.tokenizer.eos_token = stops[0]
        config = {"eos_token_id": [tokens.id_of(stop) for stop in stops]}
        with tempfile.TemporaryDirectory() as folder:
            tokens.tokenizer.save_pretrained(folder)
            Path(folder, "generation_config.json").write_text(json.dumps(config))
            subject = ChatTokenizer.load(folder)
        variables = {
            name: kwargs for name, kwargs in variables_of(template).items() if not _prints(renderer, kwargs)
        }
        return cls(pairing, tokens, oracle, subject, stops, shapes_of(template), variables)

    def cells(self) -> Iterator[Cell]:
        """Every cell of the pairing, the excluded ones too."""
        for shape in self.shapes:
            for variables in self.variables if shape.name in _WITH_EVERY_VARIABLE else ["none"]:
                every = variables == "none" and shape.name in _WITH_EVERY_ENDING
                for ending in ENDINGS if every else sampling.ENDINGS_OF_EVERY_SHAPE:
                    turn = self.turn(shape, variables)
                    if ending in sampling.COMMON_ENDINGS or (
                        isinstance(turn, Turn) and applies(ending, turn)
                    ):
                        yield Cell(shape, ending, variables)

    @cached_property
    def results(self) -> list[Result]:
        """The findings on every cell, with history and without."""
        before = repr((SHAPES, TOOLS))
        results = [result for cell in self.cells() for result in self.judge(cell)]
        assert repr((SHAPES, TOOLS)) == before, "append changed the messages or tools it was given"
        return results

    def judge(self, cell: Cell) -> list[Result]:
        """The findings on a cell, with history and without."""
        turn = self.turn(cell.shape, cell.variables)
        if isinstance(turn, Turn):
            try:
                return self._judge_shown(cell, turn, ENDINGS[cell.ending](turn))
            except Undecided as undecided:
                return self._judge_unshown(cell, undecided.reason)
        return self._judge_unshown(cell, turn.reason)

    def turn(self, shape: Shape, variables: str) -> Turn | Undecided:
        """The conversation at the moment of sampling; or why its rendering does not show what follows."""
        kwargs = self.variables[variables]
        try:
            end = self.oracle.turn_end(shape, kwargs)
        except Undecided as undecided:
            return undecided
        return Turn(self.oracle, shape, kwargs, end, self.tokens.other_stop)

    def prompt_ids(self, cell: Cell, turn: Turn, sampled: Sampled) -> list[int]:
        """The ids of the prompt and of the sampled turn."""
        prompt = self.oracle.encode(self.oracle.prompt(turn.shape, turn.kwargs))
        return prompt + sampled_ids(sampled.text, self._name(cell), self.oracle)

    def _judge_shown(self, cell: Cell, turn: Turn, sampled: Sampled) -> list[Result]:
        ids = self.prompt_ids(cell, turn, sampled)
        return self._results(cell, sampled, ids, lambda answer: self._compare(cell, sampled, ids, answer))

    def _judge_unshown(self, cell: Cell, reason: Reason) -> list[Result]:
        kwargs, other_stop = self.variables[cell.variables], self.tokens.other_stop
        unshown = Unshown.of(self.oracle, cell.shape, kwargs, cell.ending, reason, other_stop)
        sampled = unshown.sampled(self.stops[0], other_stop)
        ids = unshown.prompt() + sampled_ids(sampled.text, self._name(cell), self.oracle)
        # an aborted turn may have no ids, and `append` refuses that
        ids = ids or self.oracle.encode("Hi")

        def verdict(answer: Appended | Finding) -> Finding:
            if not isinstance(answer, Finding):
                return unshown.judge(ids, answer)
            return answer if answer.verdict is Verdict.WRONG else Finding(Verdict.EXCLUDED, reason)

        return self._results(cell, sampled, ids, verdict)

    def _results(
        self, cell: Cell, sampled: Sampled, ids: list[int], verdict: Callable[[Appended | Finding], Finding]
    ) -> list[Result]:
        """The findings on a cell, with history and without."""
        name, results = self._name(cell), []
        for history in (True, False):
            finding = verdict(self.append(cell, sampled, ids, history))
            where = f"{name} | {'with' if history else 'without'} history"
            results.append(Result(self.pairing.group, where, history, finding))
        return results

    def _compare(self, cell: Cell, sampled: Sampled, ids: list[int], appended: Appended | Finding) -> Finding:
        """The verdict on an answer, or on an error, where the ids are shown."""
        if isinstance(appended, Finding):
            return appended
        if error := malformed(appended, ids):
            return Finding(Verdict.WRONG, error)
        new_ids = appended.prompt_ids[len(ids) :]
        if new_ids == sampled.expected:
            return Finding(Verdict.EXACT)
        text, expected = self.oracle.decode(new_ids), self.oracle.decode(sampled.expected)
        cut_off = cell.shape.kind == "call" and cell.ending not in ("own stop", "other stop")
        if cut_off and text.lstrip() == expected.lstrip():
            # whether the white space before the close is part of the call's syntax is not shown
            return Finding(Verdict.EXACT)
        detail = f"appended {text!r} {new_ids} instead of {expected!r} {sampled.expected}"
        return Finding(Verdict.WRONG, Kind.OTHER_IDS, detail)

    def append(self, cell: Cell, sampled: Sampled, ids: list[int], history: bool) -> Appended | Finding:
        """The answer; or the finding on the error."""
        kwargs = dict(self.variables[cell.variables])
        try:
            return self.subject.append(
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
            return Finding(Verdict.REFUSED, type(error).__name__, str(error))
        except Exception as error:  # noqa: BLE001 - the boundary: an untyped error is a finding, not a crash
            return Finding(Verdict.WRONG, Kind.UNTYPED_ERROR, repr(error))

    def _name(self, cell: Cell) -> str:
        return f"{self.pairing.name} | {cell.shape.name} | {cell.ending} | {cell.variables}"


@functools.cache
def trial(pairing: Pairing) -> Trial:
    """The trial of a pairing, which starts once."""
    return Trial.start(pairing)


def _prints(renderer: Renderer, kwargs: Mapping[str, Any]) -> bool:
    """Whether a template prints the value of an argument, such as a token's text: it is no switch then."""
    text = renderer.render_alone([user("Hi")], kwargs) or ""
    return any(str(value) in text for value in kwargs.values() if isinstance(value, bool))


def _stops(oracle: Oracle, tokens: StandIn) -> tuple[str, ...]:
    """The stop tokens that turns of common conversations end with; EOS; and another."""
    found: list[str] = []
    for shape in SHAPES:
        try:
            end = oracle.turn_end(shape, {})
        except Undecided:
            continue
        found += [end.sampled_stop, *([end.stop] if end.close else [])]
    return tuple(dict.fromkeys([*found, tokens.eos, tokens.other_stop]))
