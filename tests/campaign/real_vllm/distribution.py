"""The pytest plugin that tells which tests each of two processes runs.

One runs the tests inside vLLM and the other those in front of it, so that each has its engine for itself. The
rest is distributed by file. (The groups of pytest-xdist 3.8, `--dist loadgroup`, do nothing with pytest 9.2.)
"""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

WAYS = ("inside vLLM", "in front")
HELD_AT_ONCE = ("test_langchain.py", "test_verifiers.py")
"""Files whose first test holds the conversations of all: two processes would hold them twice."""


class WayScheduling(LoadScopeScheduling):
    """Keeps all tests of one way to run in one process, and all other tests of a file."""

    def _split_scope(self, nodeid: str) -> str:
        test, _, parameters = nodeid.partition("[")
        file = test.partition("::")[0]
        if file.endswith(HELD_AT_ONCE):
            return file
        return next((way for way in WAYS if way in parameters), file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> WayScheduling:
    """The scheduler of this run."""
    return WayScheduling(config, log)
