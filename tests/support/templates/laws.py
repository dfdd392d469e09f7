"""What holds for every answer of `append`, whatever the template; and what is wrong with a wrong answer."""

import re
from collections.abc import Sequence
from enum import StrEnum

from tests.support.templates.marks import content_of, words_of
from tests.support.templates.shapes import Shape
from tokenization import Appended


class Kind(StrEnum):
    """What is wrong with an answer."""

    UNTYPED_ERROR = "an untyped exception"
    PREFIX = "the given ids are not a prefix of the next prompt"
    SUM = "close_ids and suffix_ids are not the ids that were appended"
    OTHER_IDS = "the right text in other ids"
    NEW_MISSING = "a new message is missing"
    NEW_DROPPED = "a new message is missing, as in the template's rendering, and the answer does not say so"
    NOT_APPENDED = "an answer, although the rendering does not print the new messages after the turn"
    NEW_REPEATED = "a new message is repeated"
    TURN_REPEATED = "text of the sampled turn is appended"
    SECOND_STOP = "a second stop token"
    CALL_SYNTAX = "call syntax after the stop token"
    EXTRA_BEFORE_NEW = "extra text before the new messages"
    CLOSE_MISSING = "the close is missing"
    OPENER_MISSING = "the opener of the next message is missing"
    SEPARATOR_MISSING = "text between the stop token and the new messages is missing"
    HEADER = "other text before the new messages"
    GENERATION_PROMPT = "another generation prompt"
    NEW_PRINTED_OTHERWISE = "other text among the new messages"


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
        if found < expected:
            return Kind.NEW_MISSING
        if found > expected:
            return Kind.NEW_REPEATED
    content = content_of(shape.history[-1])
    return Kind.TURN_REPEATED if content and content in text else None


def kind_of_difference(
    shape: Shape, ending: str, text: str, expected: str, stops: Sequence[str], syntax: str
) -> Kind:
    """What is wrong with an appended text that is not the expected one.

    Args:
        stops: the stop tokens of the model.
        syntax: the end of the turn's own text: the syntax that ends its call.
    """
    if text == expected:
        return Kind.OTHER_IDS
    if broken := broken_law(shape, text):
        return broken
    words = words_of(shape.new)
    head, expected_head = (whole[: _first(whole, words)] for whole in (text, expected))
    if head != expected_head:
        return _kind_of_head(ending, head, expected_head, stops, syntax)
    foot, expected_foot = (whole[_last(whole, words) :] for whole in (text, expected))
    return Kind.GENERATION_PROMPT if foot != expected_foot else Kind.NEW_PRINTED_OTHERWISE


def _kind_of_head(ending: str, head: str, expected: str, stops: Sequence[str], syntax: str) -> Kind:
    if head.endswith(expected):
        extra = head.removesuffix(expected)
        if syntax.strip() and syntax.strip() in extra:
            return Kind.CALL_SYNTAX
        return Kind.SECOND_STOP if any(stop in extra for stop in stops) else Kind.EXTRA_BEFORE_NEW
    if expected.endswith(head):
        if ending == "own stop":
            return Kind.SEPARATOR_MISSING
        return Kind.OPENER_MISSING if ending == "other stop" else Kind.CLOSE_MISSING
    return Kind.HEADER


def _first(text: str, words: Sequence[str]) -> int:
    return min(text.find(word) for word in words)


def _last(text: str, words: Sequence[str]) -> int:
    return max(text.rfind(word) + len(word) for word in words)
