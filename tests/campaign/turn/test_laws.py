"""The laws of reading and redacting, over many more examples than the unit layer tries."""

from collections.abc import Callable

import hypothesis
import pytest

from tests.unit.turn import test_large_body, test_law, test_usual_chunk

_LAWS: list[Callable[[], None]] = [
    test_large_body.test_ids_of_any_length_are_read,
    test_law.test_odd_evidence_never_fails_a_whole_completion_nor_shows_ids,
    test_law.test_odd_evidence_never_fails_a_stream_nor_shows_ids,
    test_law.test_stream_is_read_and_redacted_as_a_whole_completion,
    test_usual_chunk.test_any_bytes_are_read_as_if_field_by_field,
    test_usual_chunk.test_fields_of_evidence_in_a_text_are_text,
]


@pytest.mark.parametrize("law", _LAWS)
def test_law_holds_for_many_examples(law: Callable[[], None]) -> None:
    hypothesis.settings(max_examples=1000, deadline=None)(law)()
