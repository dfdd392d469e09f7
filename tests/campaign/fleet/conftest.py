from tests.contract.fleet.conftest import own_store  # noqa: F401
