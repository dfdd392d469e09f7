import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenproxy.base.errors import BadRequest
from tokenproxy.base.fields import join, parse, read

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
_SPELLINGS = st.sampled_from([{}, {"separators": (",", ":")}, {"indent": 2}, {"ensure_ascii": False}])


@given(st.dictionaries(st.text(), _VALUES), _SPELLINGS)
def test_parse_and_join_keep_values_byte_for_byte(value: dict[str, Any], spelling: dict[str, Any]) -> None:
    body = json.dumps(value, **spelling).encode()
    fields = parse(body)
    assert json.loads(join(fields)) == value
    for content in fields.values():
        assert bytes(content) in body
        assert bytes(content) in join(fields)


@pytest.mark.parametrize("body", [b"[]", b"null", b"", b'{"a": 1} {', b"{'a': 1}", b'{"\xff": 1}'])
def test_body_must_be_a_json_object(body: bytes) -> None:
    with pytest.raises(BadRequest, match=r"not valid JSON|must be a JSON object") as caught:
        parse(body)
    assert caught.value.param == "body"


def test_read() -> None:
    fields = parse(b'{"a": [1], "b": null}')
    assert read(fields, "a", list[int]) == [1]
    assert read(fields, "b", list[int]) is read(fields, "c", list[int]) is None
    with pytest.raises(BadRequest, match="`a`: Expected") as caught:
        read(fields, "a", str)
    assert caught.value.param == "a"
