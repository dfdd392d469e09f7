import pytest

from tests.support.fake_vllm import Canned, FakeVllm
from tokenproxy.base.errors import EngineBroken
from tokenproxy.engine.discovery import discover
from tokenproxy.engine.http import HttpEngine

_CHAT = "/v1/chat/completions"


async def test_logprobs_mode_is_read_from_server_info(engine: HttpEngine, fake: FakeVllm) -> None:
    assert (await discover(engine)).logprobs_mode == ""
    body = b'{"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}}'
    fake.canned["/server_info"] = Canned(body, headers={"content-type": "application/json"})
    assert (await discover(engine)).logprobs_mode == "processed_logprobs"


async def test_server_error_during_discovery_is_raised(engine: HttpEngine, fake: FakeVllm) -> None:
    fake.canned[_CHAT] = Canned(b"", 503)
    with pytest.raises(EngineBroken, match=r"returned status 503 .* retrying later"):
        await discover(engine)
