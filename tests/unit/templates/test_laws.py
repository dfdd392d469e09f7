"""The names of what is wrong with an answer."""

import pytest

from tests.support.templates.laws import Kind, broken_law, kind_of_difference
from tests.support.templates.shapes import Shape, assistant, user

_SHAPE = Shape("text", "a question", [user("Hi"), assistant("It is sunny.")], [user("And newest?")])
_STOP, _SYNTAX = "<|im_end|>", "</tool_call>"
_EXPECTED = "\n<|im_start|>user\nAnd newest?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "ending, text, kind",
    [
        ("own stop", _EXPECTED, Kind.OTHER_IDS),
        ("own stop", _STOP + _EXPECTED, Kind.SECOND_STOP),
        ("own stop", _SYNTAX + _STOP + _EXPECTED, Kind.CALL_SYNTAX),
        ("own stop", "Well." + _EXPECTED, Kind.EXTRA_BEFORE_NEW),
        ("own stop", _EXPECTED.removeprefix("\n"), Kind.SEPARATOR_MISSING),
        ("other stop", _EXPECTED.removeprefix("\n<|im_start|>"), Kind.OPENER_MISSING),
        ("length", _EXPECTED.removeprefix("\n"), Kind.CLOSE_MISSING),
        ("own stop", _EXPECTED.replace("user", "tool"), Kind.HEADER),
        ("own stop", _EXPECTED + "<think>\n", Kind.GENERATION_PROMPT),
        ("own stop", _EXPECTED.replace("newest", "latest"), Kind.NEW_MISSING),
        ("own stop", _EXPECTED + "newest?", Kind.NEW_REPEATED),
        ("own stop", "It is sunny." + _EXPECTED, Kind.TURN_REPEATED),
    ],
)
def test_kind_of_difference(ending: str, text: str, kind: Kind) -> None:
    assert kind_of_difference(_SHAPE, ending, text, _EXPECTED, [_STOP], _SYNTAX) is kind


def test_expected_text_breaks_no_law() -> None:
    assert broken_law(_SHAPE, _EXPECTED) is None
