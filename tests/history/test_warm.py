"""A conversation that goes on with one that was read is the one that would have been read anew."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.history.conversation import Asked, Conversation, Digester, Setting
from proxy.history.warm import FROM_BYTES, Warm

_TEXT = "words that fill a message. " * 20
_MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.text()}),
    min_size=1,
    max_size=6,
)
_SPELLINGS = st.sampled_from([{}, {"separators": (",", ":")}, {"indent": 1}])


def _asked(messages: list[dict[str, Any]], setting: Setting | None = None, **spelling: Any) -> Asked:
    return Asked(json.dumps(messages, **spelling).encode(), setting or Setting(), None, None)


def _same(one: Conversation, other: Conversation) -> bool:
    return vars(one) == vars(other)


@given(st.lists(_MESSAGES, min_size=1, max_size=4), _SPELLINGS)
def test_read_warm_or_cold(parts: list[list[dict[str, Any]]], spelling: dict[str, Any]) -> None:
    digester = Digester()
    history = [{"role": "user", "content": _TEXT}] * (FROM_BYTES // len(_TEXT) + 1)
    for part in [[], *parts]:
        history = history + part
        asked = _asked(history, **spelling)
        assert _same(digester.read(asked, "m"), Digester().read(asked, "m"))


@pytest.mark.parametrize("other", [Setting(tools=b"[{}]"), Setting(template_kwargs=b'{"a":1}')])
def test_another_setting_is_another_conversation(other: Setting) -> None:
    digester = Digester()
    history = [{"role": "user", "content": _TEXT * 10}]
    digester.read(_asked(history), "m")
    asked = _asked([*history, {"role": "assistant", "content": "a"}], other)
    assert _same(digester.read(asked, "m"), Digester().read(asked, "m"))


def test_only_so_many_bytes_are_held() -> None:
    digester, warm = Digester(warm_bytes=0), Warm(3 * FROM_BYTES)
    made = [digester.read(_asked([{"role": "user", "content": f"{n}" * FROM_BYTES}]), "m") for n in range(5)]
    for one in made:
        warm.put(one, None)
    held = [warm.longest(one.begin.whole, one.stem + b",") for one in made]
    assert held == [None, None, None, *made[3:]]


def test_what_is_gone_on_with_is_let_go() -> None:
    digester, warm = Digester(warm_bytes=0), Warm(2**20)
    history = [{"role": "user", "content": _TEXT * 10}]
    one = digester.read(_asked(history), "m")
    two = digester.read(_asked([*history, {"role": "assistant", "content": "a"}]), "m")
    warm.put(one, None)
    assert warm.longest(two.begin.whole, two.stem + b"]") is one
    warm.put(two, one)
    assert warm.longest(two.begin.whole, two.stem + b"]") is None
    assert warm.longest(two.begin.whole, two.stem + b", {}]") is two
