import pytest

from tests.support.fake_vllm import Canned, FakeVllm, Variant
from tokenproxy.base.errors import EngineBroken
from tokenproxy.engine.discovery import discover
from tokenproxy.engine.http import HttpEngine

_CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    "variant, found",
    [(Variant.CHAT, "chat"), (Variant.SCALE_OUT, "generate"), (Variant.NEITHER, None)],
)
async def test_spelling_is_found(
    engine: HttpEngine, fake: FakeVllm, variant: Variant, found: str | None
) -> None:
    fake.variant = variant
    token_in = (await discover(engine)).token_in
    assert (token_in and token_in.name) == found


async def test_logprobs_mode_is_read_from_server_info(engine: HttpEngine, fake: FakeVllm) -> None:
    assert (await discover(engine)).logprobs_mode == ""
    body = b'{"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}}'
    fake.canned["/server_info"] = Canned(body, headers={"content-type": "application/json"})
    assert (await discover(engine)).logprobs_mode == "processed_logprobs"


async def test_server_error_during_discovery_is_raised(engine: HttpEngine, fake: FakeVllm) -> None:
    fake.canned[_CHAT] = Canned(b"", 503)
    with pytest.raises(EngineBroken, match=r"returned status 503 .* retrying later"):
        await discover(engine)
