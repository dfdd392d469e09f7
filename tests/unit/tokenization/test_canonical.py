import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat_tokenizer import InvalidMessages
from chat_tokenizer.canonical import canonical, chain, extend, start
from chat_tokenizer.equivalences import Equivalents, Unprinted
from chat_tokenizer.lossless_json import MAX_DEPTH

Json = dict[str, Any]


def _user(content: object) -> Json:
    return {"role": "user", "content": content}


def _turn(content: object = None, **fields: object) -> Json:
    return {"role": "assistant", "content": content, **fields}


def _call(arguments: object, **fields: object) -> Json:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}, **fields}


def _called(**fields: object) -> Json:
    return _call("{}", function={"name": "f", "arguments": "{}", **fields})


def _calls(*arguments: object) -> Json:
    return _turn(tool_calls=[_call(value) for value in arguments])


def _text(text: object, **fields: object) -> Json:
    return {"type": "text", "text": text, **fields}


def _image(url: str, **fields: object) -> Json:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def _variants(make: Callable[[Any], Json], *values: object) -> list[Json]:
    return [make(value) for value in values]


def _with_x(value: str) -> Json:
    """A turn with a call whose only argument `x` is `value`, a JSON text."""
    return _calls(f'{{"x": {value}}}')


def _nested(depth: int, inside: str = "") -> str:
    return "[" * depth + inside + "]" * depth


_CUSTOM = {"type": "custom", "custom": {"name": "f", "input": "x"}, "id": "1"}
_NAMED_G = {"function": {"name": "g", "arguments": "{}"}}
SAME: list[list[Json]] = [
    # content
    [{"role": "assistant"}, *_variants(_turn, "", None, [], [""], [_text("")], [_text(None)])],
    [{"role": "user"}, *_variants(_user, None, [], [_text(None)])],
    _variants(_user, "a", ["a"], [_text("a")]),
    _variants(
        _user, "a", [_text("a", cache_control={"type": "ephemeral"})], [{"type": "input_text", "text": "a"}]
    ),
    _variants(_turn, "a", [{"type": "refusal", "refusal": "a"}], [{"type": "thinking", "thinking": "a"}]),
    _variants(_user, ["a", "b"], [_text("a"), _text("b")], ["a", _text(None), "b"]),
    _variants(_user, ["a", _image("x"), "c"], [_text("a"), _image("x"), _text("c", cache_control={})]),
    _variants(_user, [_image("x")], [_image("x", detail=None)], [{**_image("x"), "cache_control": {"x": 1}}]),
    # fields that are absent, and fields that reach no prompt
    [
        _turn("a"),
        _turn("a", name=None, refusal=None, reasoning=None, reasoning_content=None, tool_calls=None),
        _turn("a", refusal="", reasoning="", reasoning_content="", tool_calls=[], annotations=[], index=3),
        _turn("a", function_call=None, audio=None, tools=[{"x": 1}], tool_call_id=None),
    ],
    [{"role": "developer", "tools": []}, {"role": "developer", "tools": None}, {"role": "developer"}],
    # reasoning
    [
        _turn("a", reasoning="r"),
        _turn("a", reasoning=None, reasoning_content="r"),
        _turn("a", reasoning="r", reasoning_content="s"),
    ],
    # tool calls
    [
        _calls('{"x": 1, "y": [1, {"a": null, "b": "\\u00e9"}]}'),
        _calls('\n{ "y" : [ 1 , { "b" : "é" , "a" : null } ] ,\t"x" : 1 }\n'),
        _calls({"y": (1, {"b": "é", "a": None}), "x": 1}),
    ],
    _variants(_calls, "{}", " { } ", {}, "", None),
    [*_variants(_with_x, "1.0", "1.00", "10e-1"), _calls({"x": 1.0})],
    [_with_x(str(2**90)), _calls({"x": 2**90})],
    _variants(_calls, '"\\ud83d\\ude00"', '"😀"'),
    _variants(_calls, _nested(MAX_DEPTH), _nested(MAX_DEPTH, " ")),
    [
        _turn(tool_calls=(_call("{}"),)),
        _turn(tool_calls=[_call("{}", type=None)]),
        _turn(tool_calls=[{"id": "1", "function": {"name": "f"}}]),
    ],
    [_turn(tool_calls=[_CUSTOM]), _turn(tool_calls=[{"function": None, **_CUSTOM}])],
]
"""Each group holds spellings of one message."""

DIFFERENT: list[list[Json]] = [
    # parts, and fields that reach the template
    _variants(_user, "", None, "a\nb", ["a", "b"], ["a", "", "b"], ["", "a"], "a", "b"),
    _variants(_user, "a", [_text("a", x=1)], [_text("a", x=2)], [_text("a", y=1)], [_text("a", x=None)]),
    [_calls("{}"), *(_turn(tool_calls=[_call("{}", **{name: 0})]) for name in ("index", "x"))],
    [_calls("{}"), *(_turn(tool_calls=[_called(**{name: 0})]) for name in ("x", "y"))],
    # text
    _variants(_user, "", "a", "a ", " a", "a\n", "A", "a\nb", "a\r\nb", "null", "[]", "é", "e\u0301"),
    _variants(_user, "\ud83d\ude00", "😀", "\ud83d", "\ude00\ud83d"),
    # roles
    _variants(lambda role: {"role": role, "content": "a"}, "system", "developer", "user", "tool", "User"),
    # a text that looks like a part, a call or an encoding differs from it
    _variants(_user, '[{"type": "text", "text": "a"}]', [_text("a")], "s1:a", "s1:as1:b", ["s1:a", "s1:b"]),
    [_turn("a", name="bc"), _turn("ab", name="c"), _turn("abc", name=""), _turn("abc")],
    [_turn("a"), _turn("b"), *(_turn("a", **{key: "b"}) for key in ("reasoning", "refusal", "name", "task"))],
    [_turn("", reasoning='b","content":"a'), _turn("a", reasoning="b"), _turn("a", reasoning="b ")],
    [_turn("<think>r</think>a"), _turn("a", reasoning="r")],
    # other parts
    _variants(_user, [_image("x")], [_image("y")], [_image("x", detail="low")], [_image("x"), _image("x")]),
    _variants(
        _user,
        ["x"],
        [{"text": "x"}],
        ["", _image("x")],
        ["a", _image("x")],
        [_image("x"), "a"],
        [{"image_url": "x"}],
    ),
    _variants(_user, [{**_image("x"), "uuid": "1"}], [{**_image("x"), "uuid": "2"}], [_image("x")]),
    # names and ids
    [{"role": "tool", "content": "a", "tool_call_id": call_id} for call_id in ("1", "2", "", 1, None)],
    [{"role": "tool", "content": "a", "name": "1"}, {"role": "tool", "content": "a", "tool_call_id": "1"}],
    [{"role": "developer", "tools": tools} for tools in ([], [{"a": 1, "b": 2}], [{"b": 2, "a": 1}])],
    # tool calls
    [_turn(), *(_turn(tool_calls=[_call("{}", **field)]) for field in ({}, {"id": "2"}, {"id": None}))],
    [_calls("{}"), *(_turn(tool_calls=[_call("{}", **field)]) for field in ({"type": "custom"}, _NAMED_G))],
    [_turn(tool_calls=[_call("{}", id=each) for each in ids]) for ids in ("12", "21", "1", "2")],
    [_calls('{"x":1}', "{}"), _calls("{}", '{"x":1}'), _calls('{"x":1}{}')],
    # arguments that are JSON
    _variants(_with_x, "1", "1.0", "-1", "0", "0.0", "-0.0", "true", "false", "null", "{}", '""', '"1"'),
    _variants(_with_x, "[]", "[1]", "[null]", "[[]]", "[[],[]]", "[[[]]]", "[1,2]", "[2,1]", "[[1],2]"),
    _variants(_with_x, '" "', '"a"', '"a "', r'"\n"', r'"\\n"', '"{}"'),
    _variants(_calls, '{"x": 1}', '{"y": 1}', '{"x": 1, "y": 1}', "{}", '{"": 1}', '"x"', "1"),
    _variants(_calls, *({"x": number} for number in (2**64, 2**64 + 1, float(2**64), 10**5000))),
    _variants(_calls, r'"\ud83d"', r'"\ude00"', r'"\ud83d\ude00"', '"\ud83d\ude00"'),
    # arguments that are not JSON, or that lose information when parsed: the text counts
    _variants(_calls, "{'x': False}", "{'x':False}", '{"x": False}', '{"x": false}', " ", "\ufeff{}", "{}"),
    _variants(_calls, '{"x":1,"x":2}', '{"x":2,"x":2}', '{"x":2}', '{"x": 2, "x": 2}', r'{"x":2,"\u0078":2}'),
    _variants(_with_x, "NaN", "NaN ", "Infinity", "-Infinity", "1e400", "1e400 ", "1e401", "-1e400"),
    _variants(_calls, "1" * 5000, "1" * 4999 + "2", " " + "1" * 5000),
    _variants(_calls, _nested(MAX_DEPTH + 1), _nested(MAX_DEPTH + 1, " "), _nested(MAX_DEPTH)),
]
"""Each group holds messages that all differ."""

INVALID: list[tuple[Any, str]] = [
    (None, "message 3 must be an object"),
    *((message, "message 3 needs a role") for message in ({"role": ""}, {"role": 5})),
    (_user(_text("a")), "content of message 3 must be a string or a list"),
    (_user([_text(5)]), "a text part in message 3 holds no text"),
    (_user([{"type": "image_pil", "image_pil": object()}]), "type 'object' is not JSON"),
    (_turn(tool_calls="f"), "tool calls of message 3 must be a list"),
    (_turn(tool_calls=[{"id": "1"}]), "tool calls of message 3 must be objects with a function"),
    (_calls({1: "a"}), "names in an object must be strings"),
]


@pytest.mark.parametrize("spellings", SAME)
def test_spellings_of_one_message_are_equal(spellings: list[Json]) -> None:
    assert len({canonical(message) for message in spellings}) == 1


@pytest.mark.parametrize("messages", DIFFERENT)
def test_different_messages_differ(messages: list[Json]) -> None:
    for first, second in itertools.combinations(messages, 2):
        assert canonical(first).strict != canonical(second).strict, (first, second)


@pytest.mark.parametrize("message, error", INVALID)
def test_invalid_messages_are_rejected(message: Any, error: str) -> None:
    with pytest.raises(InvalidMessages, match=error):
        canonical(message, 3)


def test_unclosed_strings_take_linear_time() -> None:
    canonical(_calls("[" * 200 + '"' + '\\"' * 1_000_000 + "\\"))  # quadratic time is longer than the limit


def test_digests_are_stable() -> None:
    """Digests are stored: if one of these changes, recorded conversations are no longer found."""
    digests = canonical(_turn("a ", reasoning="r", tool_calls=[_call('{"x": 1}')]))
    assert digests.strict.hex() == "3e73886cd3a8b5eb3ac6410914594af3"
    assert digests.loose.hex() == "5f7a96750a0af3f238181e0b845c7c0c"
    assert digests.reasoning.hex() == "518ed53b2d4ee54f936e563825865053"
    assert start().hex() == "daa743d46245bdb44ac663436768aa01"
    assert extend(start(), digests.strict).hex() == "e83e9132e1c4e5585a9204ba30b1b398"


@pytest.mark.parametrize(
    "recorded, sent",
    [
        (_turn("a", reasoning="r"), _turn("a")),
        (_turn("\n\na ", reasoning="r\n"), _turn("a", reasoning_content="r")),
        (_turn("\n", tool_calls=[_call('{"x": 1}')]), _turn(None, tool_calls=[_call('{"x":1}')])),
        (_turn("a", reasoning="\n"), _turn("a")),
        # a decoder's mark of a character that was cut
        (_turn("a "), _turn("a \ufffd\ufffd")),
        # JSON.stringify(JSON.parse(text)), which clients in JavaScript do with the arguments of calls
        (_with_x("1.0"), _with_x("1")),
        (_with_x("[[2.50, 3.0]]"), _with_x("[[2.5, 3]]")),
    ],
)
def test_stripped_content_missing_reasoning_and_whole_floats_make_a_copy(recorded: Json, sent: Json) -> None:
    original, copied = canonical(recorded), canonical(sent)
    assert copied.strict != original.strict
    assert copied.loose == original.loose
    assert copied.is_copy_of(original)


@pytest.mark.parametrize(
    "recorded, sent, loose",
    [
        # the loose digest ignores reasoning, so `is_copy_of` compares it
        (_turn("a", reasoning="r"), _turn("a", reasoning="s"), True),
        (_turn("a"), _turn("a", reasoning="r"), True),
        (_turn("a b"), _turn("a  b"), False),
        (_turn("a b"), _turn("a \ufffdb"), False),
        (_user("a"), _user("a\ufffd"), False),
        (_turn("a", refusal="r"), _turn("a"), False),
        (_calls("abc"), _calls("abc "), False),
        *((_with_x("1.0"), _with_x(edited), False) for edited in ("1.5", '"1"')),
        (_user("a"), _user("a "), False),
        ({"role": "tool", "content": "a\n"}, {"role": "tool", "content": "a"}, False),
        (_turn([" a", _image("x")]), _turn(["a", _image("x")]), False),
        # white space may be dropped, not added or changed; U+FFFD may be added
        (_turn("a"), _turn("a\n"), True),
        (_turn("\na\n"), _turn("\na"), True),
        (_turn("a", tool_calls=[_call("{}")]), _turn("\n\na\n\n", tool_calls=[_call("{}")]), True),
        (_turn("a\ufffd"), _turn("a"), True),
        (_turn("a"), _turn("a\n\ufffd"), True),
    ],
)
def test_other_edits_make_no_copy(recorded: Json, sent: Json, loose: bool) -> None:
    assert (canonical(sent).loose == canonical(recorded).loose) is loose
    assert not canonical(sent).is_copy_of(canonical(recorded))


_UNPRINTED = Unprinted(fields=frozenset({"call", "part"}), printed=frozenset({("call", "x"), ("part", "x")}))
_SHAPES: list[Json] = [
    *_variants(_user, "a\nb", ["a", "b"], ["a", "", "b"], [_text("a", y=1), "b"], [_text("a", x=1), "b"]),
    {"role": "tool", "content": "a\nb"},
    {"role": "tool", "content": [_text("a", x=1), "b"]},
    {"role": "tool", "content": ["a", "", "b"]},
    _turn(tool_calls=[_called()]),
    _turn(tool_calls=[_called(y=1)]),
    _turn(tool_calls=[_called(x=1)]),
]


@pytest.mark.parametrize(
    "unprinted, groups",
    [
        (Unprinted(), [*((index,) for index in range(11))]),
        (Unprinted(content_format="openai"), [(0,), (1,), (2,), (3,), (4,), (5, 6), (7,), (8,), (9,), (10,)]),
        (Unprinted(content_format="string"), [(0, 1, 2, 3, 4), (5, 6, 7), (8,), (9,), (10,)]),
        (_UNPRINTED, [(0,), (1, 3), (2,), (4,), (5,), (6,), (7,), (8, 9), (10,)]),
    ],
)
def test_what_a_template_does_not_get_or_print_is_ignored(
    unprinted: Unprinted, groups: list[tuple[int, ...]]
) -> None:
    found: dict[bytes, tuple[int, ...]] = {}
    for index, message in enumerate(_SHAPES):
        strict = canonical(message, 0, Equivalents(unprinted=unprinted)).strict
        found[strict] = (*found.get(strict, ()), index)
    assert [*found.values()] == groups


_CUT_OFF = '{"city": "Par'


@pytest.mark.parametrize(
    "recorded, sent, repaired",
    [
        ([_CUT_OFF], [{"city": "Par"}], True),
        ([_CUT_OFF], [_CUT_OFF], False),
        (['{"a": 1.0}', _CUT_OFF], ['{"a":1}', "{}"], True),
        (['{"a": 1}', _CUT_OFF], ['{"a":2}', "{}"], None),
        ([_CUT_OFF], ['{"city": "Pa'], None),
        (["null"], ["{}"], True),
        (["null"], ['{"a": 1}'], None),
        ([_CUT_OFF], [{"city": "London"}], None),
        ([_CUT_OFF], [{"city": "Paris"}], None),
        (['{"city": "Paris", "day":'], [{"city": "Paris"}], True),
        (['{"days": [1, 2'], [{"days": [1, 2]}], True),
        (['{"a": "b\\'], [{"a": "b"}], True),
        (['{"cmd": "ls", "cmd": "pwd"}'], [{"cmd": "pwd"}], True),
        (['{"cmd": "ls", "cmd": "pwd"}'], [{"cmd": "rm"}], None),
        (['{"x": NaN}'], [{"y": "anything"}], None),
    ],
)
def test_an_object_in_place_of_other_arguments_is_a_repair(
    recorded: list[object], sent: list[object], repaired: bool | None
) -> None:
    before, after = canonical(_calls(*recorded)), canonical(_calls(*sent))
    assert before.without_arguments == after.without_arguments != b""
    assert after.repairs(before.arguments) is repaired


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"a": 1, "b": 2}}}
TOOL_WITH_KEYS_SWAPPED = {"type": "function", "function": {"name": "f", "parameters": {"b": 2, "a": 1}}}


def test_different_arguments_of_start() -> None:
    values: tuple[Any, ...] = (None, True, 1, 1.0, "1", [], {}, "", {"x": 1, "y": 2}, {"y": 2, "x": 1})
    arguments: list[Json] = [
        *({"tools": tools} for tools in ([TOOL], [TOOL_WITH_KEYS_SWAPPED], [TOOL, {}], [{}, TOOL])),
        *({"template_kwargs": kwargs} for kwargs in ({}, {"b": 1}, *({"a": value} for value in values))),
        *({"model": ""}, {"model": "m"}, {"session": ""}, {"session": "m"}, {"model": "m", "session": "m"}),
    ]
    assert len({start(**each) for each in arguments}) == len(arguments)
    assert start() == start(tools=[], template_kwargs={}, model=None, session=None)
    assert start(tools=[TOOL]) == start(tools=(copy.deepcopy(TOOL),))
    assert start(template_kwargs={"a": 1, "b": 2}) == start(template_kwargs={"b": 2, "a": 1})


def test_chain_equals_repeated_extend() -> None:
    digest = start(tools=[TOOL], template_kwargs={"a": 1}, model="m", session="s")
    messages = [_user("u"), _turn("a ", reasoning="r"), _user("v")]
    links = [digest := extend(digest, canonical(message).strict) for message in messages]
    assert chain(messages, tools=[TOOL], template_kwargs={"a": 1}, model="m", session="s") == links
    with pytest.raises(InvalidMessages, match="message 1 needs a role"):
        chain([_user("a"), {"content": "a"}], tools=None, template_kwargs=None)
    with pytest.raises(InvalidMessages, match="type 'set' is not JSON"):
        start(template_kwargs={"a": set()})


_NAMES = ["type", "text", "uuid", "image_url", "refusal", "cache_control", "function", "arguments"]
_WILD = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(st.characters(exclude_categories=())) | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(_NAMES) | st.integers() | st.text(), inner, max_size=4)
    ),
)
_FIELDS = ("content", "tool_calls", "name", "reasoning", "reasoning_content", "refusal", "tools")


@given(st.fixed_dictionaries({"role": st.just("assistant")}, optional=dict.fromkeys(_FIELDS, _WILD)) | _WILD)
def test_any_value_has_digests_or_raises_invalid_messages(message: Any) -> None:
    before = repr(message)
    try:
        digests = canonical(message)
    except InvalidMessages:
        digests = None
    assert repr(message) == before
    if digests is not None:
        assert digests == canonical(copy.deepcopy(message))
        assert (len(digests.strict), len(digests.loose), len(digests.reasoning) in (0, 16)) == (16, 16, True)
