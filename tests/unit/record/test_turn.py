import struct

from hypothesis import given
from hypothesis import strategies as st

from tokenproxy.record.turn import new_id, pack_ids, pack_logprobs, unpack_ids, unpack_logprobs

_NUMBERS = st.integers(0, 2**31 - 1)
_IDS = st.lists(_NUMBERS)
_LOGPROBS = st.lists(st.floats(max_value=0.0, allow_nan=False, width=32))


@given(_IDS, _LOGPROBS)
def test_ids_and_logprobs_are_little_endian(ids: list[int], logprobs: list[float]) -> None:
    assert pack_ids(ids) == struct.pack(f"<{len(ids)}i", *ids)
    assert unpack_ids(pack_ids(ids)) == ids
    assert pack_logprobs(logprobs) == struct.pack(f"<{len(logprobs)}f", *logprobs)
    assert unpack_logprobs(pack_logprobs(logprobs)) == logprobs


def test_new_ids_sort_by_time() -> None:
    ids = [new_id() for _ in range(100)]
    assert len(set(ids)) == 100
    assert all(len(name) == 32 and int(name, 16) for name in ids)
    assert [name[:16] for name in ids] == sorted(name[:16] for name in ids)
