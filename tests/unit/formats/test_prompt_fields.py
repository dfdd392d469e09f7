"""Arrays of ids in large bodies: what is cut out equals what is parsed."""

import json
from typing import Any

import pytest

from tokenproxy.base.errors import BadRequest
from tokenproxy.base.fields import parse
from tokenproxy.formats.prompt_fields import parse_with_ids

_IDS = list(range(5_000))


@pytest.mark.parametrize("separators", [(",", ":"), (" ,", " :")])
@pytest.mark.parametrize(
    "body",
    [
        {"prompt_ids": _IDS, "tokens": _IDS, "n": 1},
        {"inner": {"prompt_ids": _IDS}, "tokens": [1]},
        {"text": '"prompt_ids":[1,2]', "prompt_ids": _IDS},
        {"prompt_ids": [*_IDS, [1]]},
        {"prompt_ids": [], "other": _IDS},
    ],
)
def test_ids_are_cut_out_and_put_back(body: dict[str, Any], separators: tuple[str, str]) -> None:
    raw = json.dumps(body, separators=separators).encode()
    fast, slow = parse_with_ids(raw), parse(raw)
    assert list(fast) == list(slow)
    for name, value in slow.items():
        assert json.loads(bytes(fast[name])) == json.loads(bytes(value))


@pytest.mark.parametrize("end", ["", "]", "],}", '], "n": 01}'])
def test_a_broken_large_body_is_refused(end: str) -> None:
    with pytest.raises(BadRequest, match="not valid JSON"):
        parse_with_ids(b'{"prompt_ids": [' + b"1," * 20_000 + b"1" + end.encode())
