import asyncio
import time

from proxy.metrics import Metrics
from proxy.monitoring.event_loop import INTERVAL_S, measure_lag


async def test_blocked_loop_is_measured() -> None:
    metrics = Metrics()
    task = asyncio.create_task(measure_lag(metrics))
    await asyncio.sleep(0)
    time.sleep(INTERVAL_S + 0.5)  # noqa: ASYNC251 - it blocks the loop, as it should
    await asyncio.sleep(0.05)
    task.cancel()
    assert (metrics.registry.get_sample_value("tokenproxy_event_loop_lag_seconds_sum") or 0) >= 0.5
    assert metrics.registry.get_sample_value("tokenproxy_event_loop_lag_seconds_count") == 1


async def test_an_idle_loop_is_measured_again_and_again() -> None:
    metrics = Metrics()
    task = asyncio.create_task(measure_lag(metrics))
    deadline = time.monotonic() + 20
    while (metrics.registry.get_sample_value("tokenproxy_event_loop_lag_seconds_count") or 0) < 3:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    task.cancel()
