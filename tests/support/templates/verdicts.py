"""The verdicts on calls of `append`, and the laws that hold for every answer, whatever the template."""

import re
from dataclasses import dataclass
from enum import StrEnum

from chat_tokenizer import Appended
from tests.support.templates.marks import content_of, words_of
from tests.support.templates.shapes import Shape


class Verdict(StrEnum):
    """The verdict on one call."""

    EXACT = "exact"
    REFUSED = "refused"
    """A typed error, although the oracle has an answer."""
    WRONG = "wrong"
    EXCLUDED = "excluded"
    """The oracle has no answer; `append` raises a typed error or answers as for a simpler conversation."""
    UNCHECKED = "unchecked"
    """The oracle has no answer, `append` has one, and nothing tells whether it is right."""


FINDINGS = (Verdict.WRONG, Verdict.UNCHECKED)
"""The verdicts that no cell may have."""


@dataclass(frozen=True)
class Finding:
    """A verdict and its reason."""

    verdict: Verdict
    kind: str = ""
    """What is wrong, a `Kind`; why the cell is excluded, a `Reason`; or the name of the error."""
    detail: str = ""


@dataclass(frozen=True)
class Result:
    """The finding on one cell, with or without history."""

    group: str
    """The row of the table that counts this cell."""
    cell: str
    history: bool
    """Whether `append` was given the history."""
    finding: Finding

    @property
    def verdict(self) -> Verdict:
        return self.finding.verdict


def describe(results: list[Result], verdicts: tuple[Verdict, ...]) -> str:
    """The first cells with one of the verdicts, and the reasons, as text for a failure message."""
    entries = [
        f"{result.cell}\n    {result.verdict}: {result.finding.kind}\n    {result.finding.detail}"
        for result in results
        if result.verdict in verdicts
    ]
    return "\n".join([f"{len(entries)} cells, the first of them:", *entries[:12]])


class Kind(StrEnum):
    """What is wrong with an answer."""

    UNTYPED_ERROR = "an untyped exception"
    PREFIX = "the given ids are not a prefix of the next prompt"
    SUM = "close_ids and suffix_ids are not the ids that were appended"
    OTHER_IDS = "other ids than the expected ones"
    NEW_MISSING = "a new message is missing"
    NOT_APPENDED = "an answer, although the rendering does not print the new messages after the turn"
    NEW_REPEATED = "a new message is repeated"
    TURN_REPEATED = "text of the sampled turn is appended"


def malformed(appended: Appended, ids: list[int]) -> Kind | None:
    """The error in an answer's lists of ids, given the ids that it had to append to."""
    if appended.prompt_ids[: len(ids)] != ids:
        return Kind.PREFIX
    if appended.prompt_ids[len(ids) :] != [*appended.close_ids, *appended.suffix_ids]:
        return Kind.SUM
    return None


def broken_law(shape: Shape, text: str) -> Kind | None:
    """The first law that the text of the appended ids breaks."""
    spoken = " ".join(content_of(message) for message in shape.new)
    for word in set(words_of(shape.new)):
        whole = re.compile(rf"(?<!\w){re.escape(word)}(?!\w)")
        expected, found = len(whole.findall(spoken)), len(whole.findall(text))
        if found != expected:
            return Kind.NEW_MISSING if found < expected else Kind.NEW_REPEATED
    content = content_of(shape.history[-1])
    return Kind.TURN_REPEATED if content and content in text else None
