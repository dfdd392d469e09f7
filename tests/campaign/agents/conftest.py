"""What the tasks of coding agents share."""

import pytest

from tests.support.scripted_engine import make_task_model
from tests.support.tiny_model import TinyModel


@pytest.fixture(scope="session")
def task_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """The model of the scripted engine."""
    return make_task_model(tmp_path_factory.mktemp("task_model"))
