"""Fleets of these tests are kept apart from those of other tests, whose engines may get the same ports."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default store is where the weight version of a fleet and what an admin changed are kept."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
