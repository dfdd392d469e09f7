import pytest

from tokenproxy.engine.http import GRACE_S, SLOWEST, ReadLimit

_IDLE_S = 60.0


def test_a_stream_may_pause_between_events() -> None:
    limit = ReadLimit(True, _IDLE_S)
    assert limit.seconds() == _IDLE_S
    limit.received(b"data: 1\n\n", 50.0)
    assert limit.seconds() == _IDLE_S
    assert ReadLimit(True, None).seconds() is None


def test_an_event_may_not_drip() -> None:
    limit = ReadLimit(True, _IDLE_S)
    limit.received(b"d", 40.0)
    assert limit.seconds() == pytest.approx(GRACE_S, abs=0.01)
    for byte in (b"a", b"t", b"a"):
        limit.received(byte, 1.0)
    assert limit.seconds() == pytest.approx(GRACE_S - 3, abs=0.01)
    limit.received(b": 1\r\n\r\n", 1.0)
    assert limit.seconds() == _IDLE_S


def test_a_body_may_take_the_time_of_its_bytes() -> None:
    limit = ReadLimit(False, _IDLE_S)
    limit.received(b"x" * SLOWEST * 10, 12.0)
    assert limit.seconds() == pytest.approx(GRACE_S + 10 - 12)
    limit.received(b"x", 3.0)
    assert limit.seconds() == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_the_end_of_an_event_may_arrive_in_pieces(end: bytes) -> None:
    for cut in range(1, len(end)):
        limit = ReadLimit(True, _IDLE_S)
        limit.received(b"data: 1" + end[:cut], 1.0)
        assert limit.seconds() == pytest.approx(GRACE_S, abs=0.01)
        limit.received(end[cut:], 1.0)
        assert limit.seconds() == _IDLE_S
        limit.received(b"d", 1.0)
        limit.received(b"a", 1.0)
        assert limit.seconds() == pytest.approx(GRACE_S - 1, abs=0.01)
