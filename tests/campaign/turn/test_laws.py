"""The laws of reading and redacting, over many more examples than the unit layer tries."""

from collections.abc import Callable

import hypothesis
import pytest

from tests.unit.turn import test_large_body, test_law, test_usual_chunk

_LAWS: list[Callable[[], None]] = [
    test_large_body.test_the_cut_and_the_whole_body_give_the_same,
    test_law.test_odd_evidence_never_fails_a_whole_completion_nor_shows_ids,
    test_law.test_odd_evidence_never_fails_a_stream_nor_shows_ids,
    test_law.test_stream_is_read_and_redacted_as_a_whole_completion,
    test_usual_chunk.test_any_bytes_are_redacted_as_if_they_were_parsed,
    test_usual_chunk.test_fields_of_evidence_in_a_text_are_text,
]


@pytest.mark.parametrize("law", _LAWS)
def test_law_holds_for_many_examples(law: Callable[[], None]) -> None:
    hypothesis.settings(max_examples=1000, deadline=None)(law)()
