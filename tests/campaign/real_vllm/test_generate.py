"""Generate on a real vLLM: what goes in is consumed, what is sampled is recorded with its weights."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from proxy.demo.stack import EngineProcess
from tests.campaign.real_vllm.completing import (
    GENERATE,
    Body,
    choices_of,
    complete,
    every_way,
    fresh_ids,
    joined,
    keys_of,
    samples_of,
)
from tests.campaign.real_vllm.conftest import START_TIMEOUT_S, Served, run_proxy, wait_ready
from tests.campaign.real_vllm.test_token_route import events


@contextmanager
def _tokens_in_and_out(model: Path, folder: Path) -> Iterator[dict[str, Served]]:
    """An engine with the plugin, the scale-out routes and the development routes, and a proxy before it."""
    with EngineProcess(
        model,
        extra_flags=["--enable-scale-out"],
        # a store of its own: with the version of these weights, other engines would not fit the fleet
        extra_environment={"VLLM_SERVER_DEV_MODE": "1", "TOKENPROXY_STORE": f"sqlite:///{folder}/inside.db"},
        log_file=folder / "generate.log",
    ) as engine:
        engine.wait_ready(START_TIMEOUT_S)
        wait_ready(engine.url)
        with run_proxy(engine.url, "--store", f"sqlite:///{folder}/front.db") as front:
            yield {"inside": Served(engine.url, engine), "front": Served(front, engine)}


@pytest.fixture(scope="module")
def both(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Served]]:
    with _tokens_in_and_out(model, tmp_path_factory.mktemp("generate")) as served:
        yield served


@pytest.fixture(params=["inside", "front"])
def generating(request: pytest.FixtureRequest, both: dict[str, Served]) -> Served:
    served: Served = both[request.param]
    return served


@every_way
def test_generate_is_recorded_with_the_weights_that_sampled(generating: Served, stream: bool) -> None:
    prompt, version = fresh_ids(), f"step-{secrets.token_hex(3)}"
    with generating.http() as http:
        assert http.post("/update_weight_version", json={"new_version": version}).status_code == 200
        body: Body = {
            "token_ids": prompt,
            "sampling_params": {"max_tokens": 5, "temperature": 1.1},
            "stream": stream,
        }
        answer = complete(http, GENERATE, **body)
        [choice] = choices_of(answer, stream)
        session = answer.headers["x-session-id"]
        following = [*prompt, *choice["token_ids"], 198]
        body |= {"token_ids": following}
        after = complete(http, GENERATE, **body)
        [sample] = samples_of(http, session)
    assert after.headers["x-session-id"] == session
    assert answer.headers["x-prompt-source"] == "given"
    assert sample["prompt_ids"] == prompt
    assert sample["completion_ids"][: len(choice["token_ids"])] == choice["token_ids"]
    assert [turn["temperature"] for turn in sample["turns"]] == [1.1, 1.1]
    [span] = sample["turns"][0]["weight_versions"]
    assert span == [version, 0, len(choice["token_ids"])]
    assert choice["weight_versions"] == [{"version": version, "start": 0, "end": span[2]}]


_GENERATED: dict[str, Body] = {
    "plain": {"sampling_params": {"max_tokens": 4, "temperature": 0}},
    "logprobs": {"sampling_params": {"max_tokens": 4, "temperature": 0, "logprobs": 2}},
    "prompt": {"sampling_params": {"max_tokens": 4, "temperature": 0}, "return_token_ids": True},
    "text": {"sampling_params": {"max_tokens": 4, "temperature": 0}, "output_mode": "text"},
    "choices": {"sampling_params": {"max_tokens": 4, "temperature": 1.0, "n": 2, "seed": 5}},
    "unknown": {"sampling_params": {"max_tokens": 4, "temperature": 0}, "something": {"new": 1}},
}


@every_way
@pytest.mark.parametrize("name", _GENERATED)
def test_generate_answers_as_a_stock_engine(
    engines: dict[str, EngineProcess], proxies: dict[str, str], name: str, stream: bool
) -> None:
    body: Body = {"token_ids": [1, 4093, 198, 2683], "stream": stream, **_GENERATED[name]}
    answers = []
    for url in (proxies["in front of vLLM"], engines["stock"].url):
        answer = httpx.post(url + GENERATE, json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        answers.append(list(events(answer)) if stream else [answer.json()])
    ours, stock = answers
    assert keys_of(ours) == keys_of(stock)
    if name != "choices":  # sampled with equal seeds, and yet not always equal
        assert joined(ours) == joined(stock)


def test_generate_refuses_bad_ids(generating: Served) -> None:
    with generating.http() as http:
        for ids in ([], [-1], "a", None, [1, 10**6], [5] * 9000):
            answer = http.post(GENERATE, json={"token_ids": ids, "sampling_params": {"max_tokens": 1}})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == "token_ids", answer.text


def test_generate_without_the_flag_keeps_the_engines_answer(engines: dict[str, EngineProcess]) -> None:
    answer = httpx.post(engines["plugin"].url + GENERATE, json={"token_ids": [1], "sampling_params": {}})
    assert answer.status_code == 403, (answer.headers, answer.text)
    assert "--enable-scale-out" in answer.json()["error"]["message"]
