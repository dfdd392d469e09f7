"""Tokens that name turns: only for the tenant and by the store that made them."""

import pytest

from proxy.history.echo import Signer, TurnTokens, is_unique
from proxy.history.turn import new_id

_SECRET = bytes(range(32))


def test_a_token_names_its_turn_and_item() -> None:
    signer, turn = Signer(_SECRET), new_id()
    for item in (0, 1, 65_535):
        token = signer.sign("tenant", turn, item)
        assert len(token) == 40
        assert signer.read("tenant", token) == (turn, item)


def test_a_token_is_nothing_to_others() -> None:
    turn = new_id()
    token = Signer(_SECRET).sign("a", turn)
    assert Signer(_SECRET).read("b", token) is None
    assert Signer(bytes(32)).read("a", token) is None


@pytest.mark.parametrize("position", [0, 20, 39])
def test_a_changed_token_is_none(position: int) -> None:
    signer = Signer(_SECRET)
    token = signer.sign("", new_id())
    other = "A" if token[position] != "A" else "B"
    assert signer.read("", token[:position] + other + token[position + 1 :]) is None


@pytest.mark.parametrize("text", ["", "sig", "a" * 39, "a" * 41, "a" * 40, "ä" * 40, "+/" * 20])
def test_other_text_is_no_token(text: str) -> None:
    assert Signer(_SECRET).read("", text) is None


@pytest.mark.parametrize("turn", ["", "ab", "x" * 32])
def test_only_ids_of_turns_are_signed(turn: str) -> None:
    with pytest.raises(ValueError):
        Signer(_SECRET).sign("", turn)


@pytest.mark.parametrize(
    "call_id, unique",
    [
        ("chatcmpl-tool-9b2f6f0c8a3d4e5fb1a2c3d4e5f60718", True),
        ("toolu_01A09q90qw90lq917835lq9", True),
        ("functions.get_weather:0", False),
        ("functions.getWeatherForecastForOneCity:0", False),
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
