from pathlib import Path

import pytest

from tests.support.templates.matrix import Matrix


@pytest.fixture(scope="session")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(Path(tmp_path_factory.mktemp("templates")))
