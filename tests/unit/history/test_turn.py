import struct

from hypothesis import given
from hypothesis import strategies as st

from proxy.history.turn import Turn, WeightSpan, new_id, pack_ids, pack_logprobs, unpack_ids, unpack_logprobs
from proxy.stores.packed import pack_turn, pack_turns, turn_size, unpack_turn
from tests.support.store_utils import make_turn

_NUMBERS = st.integers(0, 2**31 - 1)
_IDS = st.lists(_NUMBERS)
_LOGPROBS = st.lists(st.floats(max_value=0.0, allow_nan=False, width=32))


@given(_IDS, _LOGPROBS)
def test_ids_and_logprobs_are_little_endian(ids: list[int], logprobs: list[float]) -> None:
    assert pack_ids(ids) == struct.pack(f"<{len(ids)}i", *ids)
    assert unpack_ids(pack_ids(ids)) == ids
    assert pack_logprobs(logprobs) == struct.pack(f"<{len(logprobs)}f", *logprobs)
    assert unpack_logprobs(pack_logprobs(logprobs)) == logprobs


@given(
    st.builds(
        Turn,
        choice=_NUMBERS,
        prompt_tokens=_NUMBERS,
        stop_reason=st.none() | st.text() | _NUMBERS,
        weight_versions=st.lists(st.builds(WeightSpan, start=_NUMBERS, end=_NUMBERS)).map(tuple),
    )
)
def test_turns_come_back(turn: Turn) -> None:
    # as bytes, because NaN differs from itself
    assert pack_turn(unpack_turn(pack_turn(turn))) == pack_turn(turn)


@given(st.binary(max_size=50), _IDS, st.integers(0, 500))
async def test_long_turns_come_back(message: bytes, ids: list[int], times: int) -> None:
    turn = make_turn(messages=times * message, appended=pack_ids(times * ids))
    packed = pack_turn(turn)
    assert unpack_turn(packed) == turn
    assert await pack_turns([turn, turn]) == [packed, packed]
    assert turn_size(turn) >= len(packed)


def test_new_ids_sort_by_time() -> None:
    ids = [new_id() for _ in range(100)]
    assert len(set(ids)) == 100
    assert all(len(name) == 32 and int(name, 16) for name in ids)
    assert [name[:16] for name in ids] == sorted(name[:16] for name in ids)
