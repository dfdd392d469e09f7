from tests.unit.templates.conftest import matrix  # noqa: F401
