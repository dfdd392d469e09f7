import pytest

from proxy.engine.discovery import discover
from proxy.engine.http import HttpEngine
from proxy.errors import EngineBroken
from tests.support.fake_vllm import Canned, FakeVllm, Variant

_CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    "variant, setting, found",
    [
        (Variant.CHAT, "auto", "chat"),
        (Variant.CHAT, "generate", None),
        (Variant.SCALE_OUT, "auto", "generate"),
        (Variant.NEITHER, "auto", None),
    ],
)
async def test_spelling_is_found_or_the_given_one_is_tried(
    engine: HttpEngine, fake: FakeVllm, variant: Variant, setting: str, found: str | None
) -> None:
    fake.variant = variant
    token_in = (await discover(engine, setting)).token_in
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
