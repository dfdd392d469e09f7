"""Tokens that name turns: only for the tenant and by the store that made them."""

import pytest

from tokenproxy.record.echo import Signer, TurnTokens, is_unique
from tokenproxy.record.turn import new_id

_SECRET = bytes(range(32))


def test_a_token_names_its_turn_and_item_to_its_tenant_and_store_only() -> None:
    signer, turn = Signer(_SECRET), new_id()
    for item in (0, 1, 65_535):
        token = signer.sign("tenant", turn, item)
        assert signer.read("tenant", token) == (turn, item)
        assert signer.read("other", token) is None
        assert Signer(bytes(32)).read("tenant", token) is None
        changed = [token[:at] + ("A" if token[at] != "A" else "B") + token[at + 1 :] for at in (0, 20, 39)]
        for text in (*changed, "", "a" * 40, "ä" * 40):
            assert signer.read("tenant", text) is None


@pytest.mark.parametrize(
    "call_id, unique",
    [
        ("chatcmpl-tool-9b2f6f0c8a3d4e5fb1a2c3d4e5f60718", True),
        ("toolu_01A09q90qw90lq917835lq9", True),
        ("functions.get_weather:0", False),
        ("functions.a_tool_with_a_very_long_name_indeed:12", False),
        ("9f3bAx02k", False),
        ("", False),
    ],
)
def test_ids_that_repeat_are_replaced(call_id: str, unique: bool) -> None:
    assert is_unique(call_id) is unique
    tokens = TurnTokens(Signer(_SECRET), "t", new_id())
    given = tokens.call_id(call_id, 3)
    if unique:
        assert given == call_id
    else:
        assert Signer(_SECRET).read("t", given.removeprefix("call_")) == (tokens.turn, 3)
