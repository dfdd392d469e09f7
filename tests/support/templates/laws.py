"""What holds for every answer of `append`, whatever the template; and what is wrong with a wrong answer."""

import re
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
    BEFORE_NEW = "other text before the new messages: their opener, the close, call syntax, a second stop"
    AFTER_NEW = "other text among the new messages, or another generation prompt"


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


def kind_of_difference(shape: Shape, text: str, expected: str) -> Kind:
    """What is wrong with an appended text whose ids are not the expected ones."""
    if text == expected:
        return Kind.OTHER_IDS
    if broken := broken_law(shape, text):
        return broken
    heads = {whole[: min(map(whole.find, words_of(shape.new)))] for whole in (text, expected)}
    return Kind.BEFORE_NEW if len(heads) > 1 else Kind.AFTER_NEW
