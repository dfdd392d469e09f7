"""How the values of facts join, and how the record keeps them."""

import json
from typing import Any

import msgspec
import pytest

from tokenproxy.base.evidence import EVIDENCE, RECORDED, Fact, Joining

_FACTS = {fact.name: fact for fact in EVIDENCE}
_SPAN = {"version": "7", "start": 0, "end": 2}


def _raw(value: Any) -> msgspec.Raw | None:
    return None if value is None else msgspec.Raw(json.dumps(value).encode())


@pytest.mark.parametrize(
    ("name", "before", "after", "both"),
    [
        ("weight_versions", [_SPAN], [_SPAN], [_SPAN, {**_SPAN, "start": 2, "end": 4}]),
        ("weight_versions", None, [_SPAN], [{**_SPAN, "start": 2, "end": 4}]),
        ("weight_versions", [_SPAN], None, [_SPAN]),
        ("routed_experts", "AA", "BB", None),
        ("routed_experts", "AA", None, None),
        ("sampling_mask", [[1], [2]], [[3], [4]], [[1], [2], [3], [4]]),
        ("sampling_mask", [[1], [2]], None, None),
        ("sampling_mask", None, [[1], [2]], None),
        ("sampling_mask", [[1], [2]], [[3]], None),
        ("sampling_mask", [[1], "x"], [[3], [4]], None),
    ],
)
def test_two_segments_of_two_ids_join(name: str, before: Any, after: Any, both: Any) -> None:
    joined = _FACTS[name].join(_raw(before), _raw(after), (2, 2))
    assert (None if joined is None else json.loads(bytes(joined))) == both


def test_the_later_value_counts_where_that_is_the_rule() -> None:
    fact = Fact("load", int)
    joined = [
        fact.join(_raw(before), _raw(after), (1, 1)) for before, after in ((1, 2), (1, None), (None, 2))
    ]
    assert [each and bytes(each) for each in joined] == [b"2", b"1", b"2"]


@pytest.mark.parametrize(
    ("name", "pieces", "value"),
    [
        ("routed_experts", ["AA", None, "BB"], "BB"),
        ("routed_experts", ["AA", 1], "AA"),
        ("routed_experts", [1], None),
        ("routed_experts", [], None),
        ("sampling_mask", [[[1]], None, [[2, 3]]], [[1], [2, 3]]),
        ("sampling_mask", [[[1]], [-1]], [[1]]),
        ("sampling_mask", [[[2**31]]], None),
    ],
)
def test_pieces_are_read(name: str, pieces: list[Any], value: Any) -> None:
    assert _FACTS[name].read([msgspec.Raw(json.dumps(piece).encode()) for piece in pieces]) == value


def test_what_is_packed_is_unpacked() -> None:
    values = {"routed_experts": "AA", "sampling_mask": [[1, 2**31 - 1], []]}
    for fact in RECORDED:
        packed = fact.pack(values[fact.name], 2)
        assert msgspec.convert(packed, fact.stored.kind if fact.stored else None) == packed
        assert fact.unpack(packed) == values[fact.name]
        assert fact.pack(None, 2) is fact.unpack(None) is None
        assert (fact.pack(values[fact.name], 3) is None) is fact.per_id
    assert {fact.segments for fact in EVIDENCE} >= {Joining.SHIFTED, Joining.DROPPED}
    with pytest.raises(ValueError):
        _FACTS["sampling_mask"].unpack((b"abc", b""))
