import pytest

from tests.support.fake_vllm import Canned, FakeVllm
from tokenproxy.base.errors import EngineBroken
from tokenproxy.engine.discovery import discover
from tokenproxy.engine.http import HttpEngine

_CHAT = "/v1/chat/completions"


_PROCESSED = {0: [0.0], 1: [0.0]}


async def test_logprobs_mode_is_read_from_server_info(engine: HttpEngine, fake: FakeVllm) -> None:
    assert (await discover(engine)).logprobs_mode == "raw_logprobs"
    body = b'{"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}}'
    fake.canned["/server_info"] = Canned(body, headers={"content-type": "application/json"})
    assert (await discover(engine)).logprobs_mode == "processed_logprobs"


@pytest.mark.parametrize(
    "values, mode",
    [  # but for the second, those that vLLM 0.32 returns for SmolLM2 with each mode
        (
            {0: [-9.147411346435547, -2.67454171180725], 1: [-22.75920867919922, -2.67454171180725]},
            "raw_logprobs",
        ),
        ({0: [0.0, 0.0], 1: [-40.0, 0.0]}, "raw_logprobs"),  # the model is certain of id 0
        ({0: [-40.0, 0.0], 1: [0.0, 0.0]}, "raw_logprobs"),
        (_PROCESSED, "processed_logprobs"),
        ({0: [1.6674737930297852, 8.14034366607666], 1: [-11.94432258605957, 8.14034366607666]}, ""),
        ({0: [1.6674737930297852], 1: [-11.94432258605957]}, ""),
    ],
)
async def test_logprobs_mode_is_measured(
    values: dict[int, list[float]], mode: str, engine: HttpEngine, fake: FakeVllm
) -> None:
    fake.only_logprobs = values
    found = await discover(engine)
    assert (found.logprobs_mode, bool(found.logprobs_warning)) == (mode, mode != "processed_logprobs")


@pytest.mark.parametrize("body", [b"", b"{}", b'{"choices": []}', b'{"choices": [{"logprobs": null}]}'])
async def test_logprobs_mode_that_cannot_be_measured_is_unknown(
    body: bytes, engine: HttpEngine, fake: FakeVllm
) -> None:
    for status in (200, 400, 500):
        fake.canned["/v1/completions"] = Canned(body, status, {"content-type": "application/json"})
        found = await discover(engine)
        assert found.logprobs_mode == "" and "mode is unknown" in found.logprobs_warning


async def test_server_error_during_discovery_is_raised(engine: HttpEngine, fake: FakeVllm) -> None:
    fake.canned[_CHAT] = Canned(b"", 503)
    with pytest.raises(EngineBroken, match=r"returned status 503 .* retrying later"):
        await discover(engine)
