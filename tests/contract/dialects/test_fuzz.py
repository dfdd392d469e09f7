"""Whatever clients send, it is answered: with a whole answer, or an error that names what is wrong."""

import copy
import json
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jinja2
import pytest
from aiohttp import web

from tests.support.fake_vllm import error_body
from tests.support.message_shapes import SHAPES as MESSAGES
from tests.support.utils import Pair
from tests.unit.dialects.messages.test_conversation import CASES as CONVERSATIONS
from tests.unit.dialects.responses.test_items import CASES as INPUTS
from tests.unit.dialects.responses.test_request import FIELDS

_JUNK: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 10**30, 2**63, "", "x", "\x00", "\ud83d", "auto", "none", "resp_1"),
    *("user", "assistant", "system", [], {}, [[]], [{}], [None], ["a"], {"role": "assistant"}),
    *({"type": kind} for kind in (None, "x", "text", "message", "image", "thinking", "tool_result")),
    *({"type": "tool_use", "input": []}, {"type": "function"}, {"type": "item_reference", "id": "msg_1"}),
    *({"type": "compaction", "encrypted_content": "0" * 36}, {"type": "compaction_trigger"}, {"id": "msg_1"}),
    *({"type": "item_reference", "id": "msg_" + "0" * 36}, {"type": "reasoning", "summary": 1}),
]
_NAMES = [
    *("model", "tools", "tool_choice", "stream", "temperature", "metadata", "chat_template_kwargs", "stop"),
    *("kv_transfer_params", "n", "seed", "include_reasoning", "chat_template", "cache_salt", "vllm_xargs"),
    *("messages", "max_tokens", "system", "thinking", "output_config", "stop_sequences", "top_p", "top_k"),
    *("input", "instructions", "text", "reasoning", "include", "store", "max_output_tokens", "truncation"),
    *("previous_response_id", "top_logprobs", "background", "conversation", "prompt", "stream_options"),
]


@dataclass(frozen=True)
class Fuzzed:
    """A format: its paths, valid bodies of all shapes, and how its streams end."""

    paths: tuple[str, ...]
    bodies: list[dict[str, Any]]
    ends: tuple[str, ...]

    def body(self, chance: random.Random) -> bytes:
        """A body in which up to two values are other ones or missing, and some fields are set."""
        body: Any = {"model": "tiny", **chance.choice(self.bodies)}
        for _ in range(chance.randrange(3)):
            body = _mutated(body, chance)
            if not isinstance(body, dict):
                return json.dumps(body).encode()
        for name in chance.sample(_NAMES, chance.choice([0, 0, 1])):
            body[name] = chance.choice(_JUNK)
        return json.dumps({**body, "stream": chance.random() < 0.3 or body.get("stream")}).encode()


FUZZED = {
    "messages": Fuzzed(
        ("/v1/messages", "/v1/messages?beta=true", "/v1/messages/count_tokens"),
        [
            *({"messages": messages, "max_tokens": 8} for messages, _ in CONVERSATIONS.values()),
            *({"messages": shape.messages, "max_tokens": 8, **shape.fields} for shape in MESSAGES.values()),
        ],
        ("message_stop",),
    ),
    "responses": Fuzzed(
        ("/v1/responses", "/v1/responses", "/v1/responses/compact"),
        [
            *({"input": items} for items, _ in INPUTS.values()),
            *({"input": "Hi", **fields} for fields, _ in FIELDS.values()),
        ],
        ("response.completed", "response.incomplete", "response.failed"),
    ),
}


def _mutated(value: Any, chance: random.Random, depth: int = 0) -> Any:
    """A value in which something is another value, or missing."""
    if depth < 6 and value and isinstance(value, dict | list) and chance.randrange(8):
        kept = copy.copy(value)
        at: Any = chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
        if chance.randrange(6) == 0:
            del kept[at]
        else:
            kept[at] = _mutated(value[at], chance, depth + 1)
        return kept
    return copy.deepcopy(chance.choice(_JUNK))


def send_fuzzed(pair: Pair, fuzzed: Fuzzed, count: int, seed: int) -> Counter[int]:
    """Send so many bodies; returns how often each status was answered."""
    chance = random.Random(seed)
    statuses: Counter[int] = Counter()
    for _ in range(count):
        body = fuzzed.body(chance)
        answer = pair.client.post(chance.choice(fuzzed.paths), content=body)
        assert answer.status_code < 500, (body, answer.text)
        if answer.status_code >= 400:
            error = answer.json()["error"]
            assert error["message"] and error["type"], body
        elif "event-stream" in answer.headers["content-type"]:
            last = answer.text.split("\n\n")[-2]
            assert last.partition("\n")[0].removeprefix("event: ") in fuzzed.ends, (body, answer.text)
        statuses[answer.status_code] += 1
        pair.fake.requests.clear()
    return statuses


@pytest.fixture
def strict(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """What breaks the engine of this pair is answered with a 400."""
    chat, tokenize = pair.fake._chat, pair.fake._tokenize

    def refusing(handler: Any) -> Any:
        async def refuse(request: web.Request, seen: Any) -> web.StreamResponse:
            try:
                answer: web.StreamResponse = await handler(request, seen)
            except (KeyError, TypeError, ValueError, AttributeError, jinja2.TemplateError) as error:
                body = error_body(f"unreadable: {type(error).__name__}", "BadRequestError", None, 400)
                return web.Response(body=body, status=400, content_type="application/json")
            return answer

        return refuse

    monkeypatch.setattr(pair.fake, "_chat", refusing(chat))
    monkeypatch.setattr(pair.fake, "_tokenize", refusing(tokenize))
    return pair


@pytest.mark.parametrize("fuzzed", FUZZED.values(), ids=FUZZED)
def test_fuzzed_bodies(strict: Pair, fuzzed: Fuzzed) -> None:
    statuses = send_fuzzed(strict, fuzzed, 150, seed=13)
    # enough of both, or the bodies are not what clients send
    assert min(statuses[200], statuses[400]) > 30
