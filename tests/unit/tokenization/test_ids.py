import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat_tokenizer import InvalidIds, ids

_IDS = st.lists(st.integers(0, 2**70), min_size=1)
_SPELLINGS = st.sampled_from([{}, {"separators": (",", ":")}, {"indent": 2}, {"indent": "\t"}])


def _dumps(value: object, spelling: dict[str, Any]) -> bytes:
    return json.dumps(value, **spelling).encode()


@given(_IDS, st.lists(st.integers(0, 2**31)), _SPELLINGS)
def test_ids_are_checked_joined_and_written(
    values: list[int], more: list[int], spelling: dict[str, Any]
) -> None:
    raw = _dumps(values, spelling)
    assert ids.check(raw) == len(values)
    joined = ids.join(raw, more)
    assert json.loads(joined) == values + more
    assert joined.startswith(raw[:-1])
    assert ids.compact(raw) == ids.dump(values) == _dumps(values, {"separators": (",", ":")})
    assert ids.count_compact(raw) == (len(values) if raw == ids.dump(values) else 0)


_WRONG = [
    (b"[ \n]", "must not be empty"),
    (b"7", "must be a list of integers"),
    (b'{"7": 7}', "must be a list of integers"),
    (b'["7"]', "not strings"),
    (b"[1, true]", "not booleans"),
    (b"[1, null]", "not null"),
    (b"[1.5]", "not floats"),
    (b"[-1]", "no negative ids"),
    (b"[1, []]", "must be a flat list"),
]


@pytest.mark.parametrize("raw, message", _WRONG)
def test_checks_report_what_is_wrong(raw: bytes, message: str) -> None:
    for check in (ids.check, ids.check_whole):
        with pytest.raises(InvalidIds, match=message):
            check(raw)


def test_whole_floats_are_ids_where_that_is_allowed() -> None:
    raw, integers = b"[1e3,2E0, 0.0, -0.0, 2147483648.0]", b"[1, 2]"
    assert ids.check_whole(raw) == (b"[1000,2,0,0,2147483648]", 5)
    with pytest.raises(InvalidIds, match="not floats"):
        ids.check(raw)
    assert ids.check_whole(integers)[0] is integers


def test_last_rejects_numbers_with_too_many_digits() -> None:
    """Python itself refuses to parse integers of more than 4300 digits: hence 5000."""
    with pytest.raises(InvalidIds, match="beyond the vocabulary"):
        ids.last(b"[1, " + b"9" * 5000 + b" ]", 8)


@pytest.mark.parametrize("broken", [b",,", b",07,", b",a,", b", ,", b",-1,", b",[1],"])
@pytest.mark.parametrize("before", [32_765, 32_766, 32_767, 32_768])
def test_count_compact_finds_what_is_broken_anywhere(broken: bytes, before: int) -> None:
    raw = b"[" + (b"12345," * 20_000)[: before - 1].rstrip(b",") + b"9" + broken + b"8" * 30_000 + b"]"
    assert ids.count_compact(raw) == 0
    assert ids.count_compact(raw.replace(broken, b",")) > 1


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1), _SPELLINGS)
def test_last_and_pack(values: list[int], spelling: dict[str, Any]) -> None:
    raw = _dumps(values, spelling)
    assert [ids.last(raw, count) for count in (1, 3)] == [values[-1:], values[-3:]]
    assert ids.pack(raw) == struct.pack(f"<{len(values)}i", *values)


@pytest.mark.parametrize("raw", [b"[]", b"[2147483648]", b"[1,99999999999999999999999]", b"[1.5]", b"[-1]"])
def test_pack_refuses(raw: bytes) -> None:
    with pytest.raises(InvalidIds):
        ids.pack(raw)


@pytest.mark.parametrize("count", [1, 100, 20_000])
@pytest.mark.parametrize("place", [0, 0.5, 1])
def test_a_number_beyond_32_bits_is_found_at_each_place_of_each_length(count: int, place: float) -> None:
    others = [999_999_999] * count
    for number in (2**31 - 1, 2**31, 10**10):
        at = round(place * count)
        raw = ids.dump([*others[:at], number, *others[at:]])
        if number < 2**31:
            ids.check_size(raw)
            continue
        with pytest.raises(InvalidIds, match="beyond 2147483647"):
            ids.check_size(raw)
