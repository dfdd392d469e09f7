"""The engines of the acceptance tests, before which Ray Serve runs the proxy."""

from tests.acceptance.conftest import servers
from tests.campaign.real_vllm.conftest import model

__all__ = ["model", "servers"]
