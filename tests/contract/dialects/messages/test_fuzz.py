"""No body makes the routes fail: each gets an answer, or an error that names what is wrong."""

import json
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.support.message_shapes import SHAPES
from tests.support.utils import Pair

_SCALARS: st.SearchStrategy[Any] = (
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["user", "assistant", "system", "text", "image", "tool_use", "tool_result", "thinking"])
)
_KEYS = st.sampled_from(
    [
        "type",
        "text",
        "role",
        "content",
        "source",
        "id",
        "name",
        "input",
        "tool_use_id",
        "thinking",
        "tool",
        "x",
    ]
)
_JSON = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=12,
)
_BODIES: list[dict[str, Any]] = [
    {
        "model": "tiny",
        "max_tokens": 8,
        **{name: value for name, value in shape.fields.items() if not name.startswith("extra_")},
        "messages": shape.messages,
    }
    for shape in SHAPES.values()
]
_NAMES = [
    *(
        "model",
        "messages",
        "max_tokens",
        "system",
        "tools",
        "tool_choice",
        "thinking",
        "output_config",
        "stream",
    ),
    *("stop_sequences", "temperature", "top_p", "top_k", "metadata", "chat_template_kwargs", "cache_salt"),
    *("kv_transfer_params", "context_management", "vllm_xargs"),
]


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything in a JSON value but the value itself."""
    children: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list):
        children = list(enumerate(value))
    return [place for key, child in children for place in [(*path, key), *_places(child, (*path, key))]]


@st.composite
def _fuzzed(draw: st.DrawFn) -> bytes:
    """A valid body with up to three values replaced, added or removed."""
    body = json.loads(json.dumps(draw(st.sampled_from(_BODIES))))
    for _ in range(draw(st.integers(0, 3))):
        how = draw(st.sampled_from(["replace", "remove", "set"]))
        places = _places(body)
        if how == "set" or not places:
            body[draw(st.sampled_from(_NAMES))] = draw(_JSON)
            continue
        *path, key = draw(st.sampled_from(places))
        parent = body
        for step in path:
            parent = parent[step]
        if how == "remove":
            del parent[key]
        else:
            parent[key] = draw(_JSON)
    body["stream"] = body.get("stream") or draw(st.booleans())
    return json.dumps(body).encode()


def _check(pair: Pair, body: bytes, path: str) -> None:
    answer = pair.client.post(path, content=body)
    assert answer.status_code < 500, (answer.text, body)
    if answer.status_code >= 400:
        error = answer.json()
        assert error["type"] == "error" and error["error"]["message"], body
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n'), (
            answer.text,
            body,
        )


_PATHS = st.sampled_from(["/v1/messages", "/v1/messages?beta=true", "/v1/messages/count_tokens"])
_SHARED = [hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow]


@hypothesis.given(body=_fuzzed(), path=_PATHS)
@hypothesis.settings(suppress_health_check=_SHARED, deadline=None)
def test_fuzzed_bodies(pair: Pair, body: bytes, path: str) -> None:
    _check(pair, body, path)


@pytest.mark.slow
@hypothesis.given(body=_fuzzed(), path=_PATHS)
@hypothesis.settings(suppress_health_check=_SHARED, max_examples=5_000, deadline=None)
def test_thousands_of_fuzzed_bodies(pair: Pair, body: bytes, path: str) -> None:
    _check(pair, body, path)


_NO_UTF8 = [
    b'"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f","input":{"a":"\xff"}}]}]',
    b'"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"a","content":[%b]}]}]'
    % b'{"type":"text","text":"\xff"}',
    b'"messages":[{"role":"user","content":"a"}],"tools":[{"name":"f","input_schema":{"\xff":1}}]',
]


@pytest.mark.parametrize("fields", _NO_UTF8)
def test_bodies_that_are_not_utf8(pair: Pair, fields: bytes) -> None:
    """Also in values that are read late, or not at all."""
    answer = pair.client.post("/v1/messages", content=b'{"model":"tiny","max_tokens":8,%b}' % fields)
    assert answer.status_code == 400 and "UTF-8" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b"[]", b"null", b"[" * 5000, b'{"messages": ' + b"[" * 5000]
)
def test_bodies_that_are_no_json_object(pair: Pair, body: bytes) -> None:
    _check(pair, body, "/v1/messages")
    assert pair.client.post("/v1/messages", content=body).status_code == 400
