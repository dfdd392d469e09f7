"""What the tasks of coding agents share."""

from pathlib import Path

import pytest

from tests.campaign.agents.scripted_engine import make_task_model
from tests.support.tiny_model import TinyModel


@pytest.fixture(scope="session")
def task_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """The model of the scripted engine."""
    return make_task_model(tmp_path_factory.mktemp("task_model"))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The home of a program, which is also its working directory, with a file to edit."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "notes.txt").write_text("alpha\nbeta\n")
    return folder
