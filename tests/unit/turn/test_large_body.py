"""Large completions: what is read from cut arrays equals what is parsed from the whole body."""

import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.turn.bodies import (
    Body,
    encoded,
    logprobs_of,
    whole,
    whole_choice,
)
from tokenproxy.base.request import Visible
from tokenproxy.record.completion import Completion
from tokenproxy.turn import parsing, reader
from tokenproxy.turn.answer import Redactor
from tokenproxy.turn.parsing import CUT_FROM_BYTES

_FILLER = "x" * CUT_FROM_BYTES
_TRAPS = [
    *('","token_ids":[1,2]', '"prompt_token_ids":[9]', '"logprobs":{"content":[', '"top_logprobs":[]}]'),
    *('"(cut)"', "]}]}", "\\", "é\n\u2028"),
]
_TEXTS = st.lists(st.sampled_from([*_TRAPS, "a", " "]), max_size=4).map("".join)
_IDS: st.SearchStrategy[Any] = st.lists(st.integers(0, 2**31 - 1), max_size=4) | st.sampled_from(
    [None, "(cut)", [], [0], [0, 10], [-1], [2**31], [10**30], [1.5], [True], [[1]], ["1"]]
)
_LOGPROBS: st.SearchStrategy[Any] = st.lists(st.floats(-1e38, 1e38), max_size=3).map(
    lambda values: logprobs_of(*values)
) | st.sampled_from(
    [None, {}, {"content": None}, {"content": []}, {"content": "(cut)"}, [1], logprobs_of("x")]
)
_VISIBLE = st.builds(Visible, st.booleans(), st.booleans())


def _plain(completion: Completion) -> Any:
    """A completion with lists in place of arrays, and without what only the fast path keeps."""
    choices = [
        (
            (choice.index, choice.message, choice.finish_reason, choice.stop_reason),
            choice.ids if choice.ids is None else list(choice.ids),
            choice.logprobs if choice.logprobs is None else list(array("f", choice.logprobs)),
            (choice.weight_versions, choice.routed_experts, choice.unreadable),
        )
        for choice in completion.choices
    ]
    return completion.prompt_ids, completion.completion_tokens, choices


def _agree(body: bytes, visible: Visible, sent: bytes = b"") -> bool:
    """Check a body that is read fast; False if it is not."""
    parsed, whole = parsing.parse(body, whole=True), parsing.parse(body, one_prompt=False)
    if parsed.ids is None:
        return False
    assert _plain(reader.read_completion(parsed, sent)) == _plain(reader.read_completion(whole, sent))
    redactor = Redactor(visible)
    assert redactor.whole(parsed, body, Completion()) == redactor.whole(whole, body, Completion())
    return True


@given(_IDS, _IDS, _LOGPROBS, _TEXTS, _TEXTS, _VISIBLE, st.booleans())
def test_the_cut_and_the_whole_body_give_the_same(
    prompt: Any, ids: Any, logprobs: Any, text: str, token: str, visible: Visible, spaced: bool
) -> None:
    if isinstance(logprobs, dict) and isinstance(logprobs.get("content"), list):
        for entry in logprobs["content"]:
            entry["token"] = token
    message = {"role": "assistant", "content": text + _FILLER}
    choice = whole_choice(message=message, token_ids=ids, logprobs=logprobs)
    body = encoded(whole(choice, prompt_token_ids=prompt), spaced=spaced)
    _agree(body, visible)
    _agree(body, visible, sent=json.dumps(prompt, separators=(",", ":")).encode())


def _large(**fields: Any) -> Body:
    """A choice with a long text; `fields` replace its own."""
    return whole_choice(**{"message": {"role": "assistant", "content": _FILLER}, **fields})


@pytest.mark.parametrize(
    "body",
    [
        whole(_large()),
        whole(_large(logprobs=None)),
        whole(_large(stop_reason=2, weight_versions=[{"version": 1, "start": 0, "end": 2}])),
        whole(_large(), prompt_token_ids=None, usage=None),
        whole(_large(), inner={"token_ids": [1], "prompt_token_ids": [2]}),
    ],
)
def test_usual_bodies_are_cut(body: Body) -> None:
    for visible in (Visible(ids, logprobs) for ids in (False, True) for logprobs in (False, True)):
        assert _agree(encoded(body), visible)
        assert _agree(encoded(body), visible, sent=b"[5,6]")
