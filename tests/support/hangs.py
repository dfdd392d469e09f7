"""The time limits of the layers. A test that reaches its own reports the stacks of all threads and tasks."""

import asyncio
import gc
import io
import sys
import threading
import traceback
from collections.abc import Generator
from pathlib import Path

import pytest

LIMIT_S = {"unit": 20, "contract": 20, "acceptance": 120}
"""How long a test may take, its fixtures included. For the campaign, pyproject.toml has the limit."""
_TESTS = Path(__file__).parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test the time limit of its layer, but one that states its own."""
    for item in items:
        limit_s = LIMIT_S.get(item.path.relative_to(_TESTS).parts[0])
        if limit_s is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(limit_s))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the stacks to the report of a test that failed because its time was over."""
    report = yield
    if call.excinfo is not None and "Timeout (>" in str(call.excinfo.value):
        report.sections.append(("threads and tasks at the timeout", stacks()))
    return report


def stacks() -> str:
    """The stacks of all threads but this one, and of all tasks that are not done, whatever loop runs them."""
    out = io.StringIO()
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.ident in frames:
            out.write(f"thread {thread.name}\n{''.join(traceback.format_stack(frames[thread.ident]))}\n")
    for task in [found for found in gc.get_objects() if type(found) is asyncio.Task]:
        if not task.done():
            task.print_stack(file=out)
    return out.getvalue()
