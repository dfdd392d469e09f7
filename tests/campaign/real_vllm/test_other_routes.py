"""Every other route of the engine, untouched, next to the token routes."""

import openai
import pytest

from tests.campaign.real_vllm.conftest import INSIDE, Served


def test_openai_sdk_routes(server: Served) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == ["smollm2"]
    messages = [{"role": "user", "content": "Name a colour."}]
    chat = client.chat.completions.create(model="smollm2", messages=messages, max_tokens=6, temperature=0)  # type: ignore[arg-type]
    streamed = client.chat.completions.create(
        model="smollm2",
        messages=messages,  # type: ignore[arg-type]
        max_tokens=6,
        temperature=0,
        stream=True,
    )
    assert isinstance(streamed, openai.Stream)
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == chat.choices[0].message.content
    )
    assert getattr(chat, "prompt_token_ids", None) is None
    completion = client.completions.create(model="smollm2", prompt="One, two,", max_tokens=3)
    assert completion.choices[0].text
    response = client.responses.create(model="smollm2", input="Name a colour.", max_output_tokens=16)
    assert response.output_text


def test_anthropic_messages_stream(server: Served) -> None:
    body = {
        "model": "smollm2",
        "max_tokens": 4,
        "stream": True,
        "messages": [{"role": "user", "content": "Hi"}],
    }
    with server.http() as http, http.stream("POST", "/v1/messages", json=body) as response:
        lines = list(response.iter_lines())
    assert "event: message_start" in lines
    assert "event: message_stop" in lines


def test_plain_routes(server: Served) -> None:
    with server.http() as http:
        assert http.get("/health").status_code == 200
        assert http.get("/version").json()["version"]
        counted = http.get("/metrics").text
        assert "tokenproxy_prompts_total" in counted
        assert ("vllm:num_requests_running" in counted) == (server.url == server.engine.url)
        assert http.get("/no/such/route").status_code == 404
        assert http.get("/v1/chat/completions").status_code == 405
        embeddings = http.post("/v1/embeddings", json={"model": "smollm2", "input": "Hi"})
        assert 400 <= embeddings.status_code < 500


def test_openapi_page_shows_the_token_route(server: Served) -> None:
    with server.http() as http:
        paths = http.get("/openapi.json").json()["paths"]
    assert "prompt_ids" in str(paths["/v1/chat/completions/tokens"])
    assert "/tokenize" in paths and "/ready" in paths


def test_ready_reports_how_ids_are_sent(server: Served, request: pytest.FixtureRequest) -> None:
    with server.http() as http:
        answer = http.get("/ready")
    [engine] = answer.json()["engines"]
    assert answer.status_code == 200
    assert engine["token_in"] == "chat"
    assert engine["model"] == "smollm2"
    inside = request.node.callspec.params["server"] == INSIDE
    assert engine["engine"] == ("in-process" if inside else server.engine.url)
