import pytest

from proxy.engine.discovery import CredentialRequired, Model, discover
from proxy.engine.http import HttpEngine
from proxy.errors import EngineBroken, Unsupported
from tests.support.fake_vllm import MAX_MODEL_LEN, Canned, FakeVllm, Variant

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


async def test_engine_without_token_in_is_unsupported(engine: HttpEngine, fake: FakeVllm) -> None:
    fake.variant = Variant.NEITHER
    with pytest.raises(Unsupported, match=r"upgrade vLLM .* or start it with --enable-scale-out") as caught:
        (await discover(engine)).require_token_in()
    assert (caught.value.code, caught.value.param) == ("no_token_in", "prompt_ids")


async def test_version_and_models_are_discovered_with_requests_for_one_token(
    engine: HttpEngine, fake: FakeVllm
) -> None:
    capabilities = await discover(engine)
    assert capabilities.version == "0.32.0+fake"
    assert capabilities.model == Model("tiny", fake.root, MAX_MODEL_LEN)
    assert set(capabilities.models) == {"tiny", "adapter"}
    assert [seen.json["max_tokens"] for seen in fake.seen(_CHAT)] == [1] * 5


async def test_logprobs_mode_is_read_from_server_info(engine: HttpEngine, fake: FakeVllm) -> None:
    assert (await discover(engine)).logprobs_mode == ""
    body = b'{"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}}'
    for answer, mode in ((body, "processed_logprobs"), (b'{"vllm_config": "text"}', "")):
        fake.canned["/server_info"] = Canned(answer, headers={"content-type": "application/json"})
        assert (await discover(engine)).logprobs_mode == mode


async def test_server_error_during_discovery_is_raised(engine: HttpEngine, fake: FakeVllm) -> None:
    fake.canned[_CHAT] = Canned(b"", 503)
    with pytest.raises(EngineBroken, match=r"returned status 503 .* retrying later"):
        await discover(engine)


async def test_engine_that_requires_a_key(engine: HttpEngine, fake: FakeVllm) -> None:
    fake.api_keys = ("secret",)
    with pytest.raises(CredentialRequired, match="set `upstream_api_key`"):
        await discover(engine)
