"""`/tokenize` and `/detokenize` on a real vLLM."""

from pathlib import Path

from tests.campaign.real_vllm.conftest import Served
from tests.campaign.real_vllm.test_token_route import PROMPT
from tokenization import ChatTokenizer

HISTORY = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
]
NEW = [{"role": "user", "content": "And twice that?  Grüße 四"}]


def test_append_equals_the_engines_rendering_when_nothing_drifted(server: Served) -> None:
    with server.http() as http:
        whole = http.post("/tokenize", json={"messages": [*HISTORY, *NEW]}).json()
        before = http.post("/tokenize", json={"messages": HISTORY, "add_generation_prompt": False}).json()
        # the turn as the model leaves it: the stop token sampled, the line feed after it not
        sampled = before["tokens"][:-1]
        appended = http.post("/tokenize", json={"prompt_ids": sampled, "append_messages": NEW}).json()
    assert appended["tokens"] == whole["tokens"]
    assert appended["appended"] == len(whole["tokens"]) - len(sampled)
    assert appended["count"] == len(whole["tokens"])
    assert appended["max_model_len"] == whole["max_model_len"] == 8192


def test_a_turn_that_was_cut_off_is_closed(server: Served) -> None:
    with server.http() as http:
        body = {"prompt_ids": PROMPT, "append_messages": NEW, "return_token_strs": True}
        appended = http.post("/tokenize", json=body).json()
    assert appended["tokens"][: len(PROMPT)] == PROMPT
    assert appended["token_strs"][len(PROMPT) : len(PROMPT) + 3] == ["<|im_end|>", "Ċ", "<|im_start|>"]


def test_required_prefix_keeps_the_models_tokens(server: Served) -> None:
    with server.http() as http:
        request = {"messages": [*HISTORY, *NEW]}
        whole = http.post("/tokenize", json=request).json()["tokens"]
        first_ids = http.post("/tokenize", json={"messages": HISTORY[:1]}).json()["tokens"]
        model_ids = [*first_ids, 57, 100, 30, 2]
        kept = http.post("/tokenize", json=request | {"required_prefix_token_ids": model_ids}).json()
    last_stop = len(whole) - 1 - whole[::-1].index(2, 0)
    close_of_history = [i for i, token in enumerate(whole) if token == 2][-2]
    assert last_stop > close_of_history
    assert kept["tokens"] == model_ids[:-1] + whole[close_of_history:]
    assert kept["count"] == len(kept["tokens"])


def test_plain_contracts_are_vllms(server: Served, model: Path) -> None:
    local = ChatTokenizer.load(model)
    with server.http() as http:
        tokens = http.post("/tokenize", json={"messages": HISTORY}).json()["tokens"]
        assert tokens == local.render(HISTORY)
        prompt = http.post("/tokenize", json={"prompt": "two  words"}).json()
        assert prompt["count"] == len(prompt["tokens"]) == len(local.encode("two  words"))
        text = http.post("/detokenize", json={"tokens": prompt["tokens"]}).json()["prompt"]
    assert text == "two  words"
