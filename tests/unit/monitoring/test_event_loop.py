import pytest

from proxy.metrics import Metrics
from proxy.monitoring.event_loop import INTERVAL_S, measure_lag


async def test_each_interval_is_measured_with_its_lag() -> None:
    metrics, lags, now = Metrics(), [0.0, 0.5, 0.25], 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        if not lags:
            raise InterruptedError
        assert seconds == INTERVAL_S
        now += seconds + lags.pop(0)

    with pytest.raises(InterruptedError):
        await measure_lag(metrics, lambda: now, sleep)
    value = metrics.registry.get_sample_value
    assert value("tokenproxy_event_loop_lag_seconds_sum") == pytest.approx(0.75)
    assert value("tokenproxy_event_loop_lag_seconds_count") == 3
