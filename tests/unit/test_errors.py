import inspect
import json
import re

import pytest

from tokenproxy.base import errors
from tokenproxy.base.errors import ApiError, EngineUnavailable

_CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, ApiError) and value is not ApiError
]


def test_docstring_lists_all_errors_with_their_status() -> None:
    documented = re.findall(r"── (\w+) +(\d{3})  \w", errors.__doc__ or "")
    assert documented == [(kind.__name__, str(kind.status)) for kind in _CLASSES]


@pytest.mark.parametrize("kind", _CLASSES)
def test_body_is_an_openai_error_object(kind: type[ApiError]) -> None:
    error = json.loads(kind('what "is" wrong').body())["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error == {"message": 'what "is" wrong', "type": kind.kind, "param": None, "code": kind.status}


def test_retry_after_header() -> None:
    assert (b"retry-after", b"2") in EngineUnavailable("down").headers()
