"""Cache keys of JSON-like values."""

import hashlib
import json
import marshal
from typing import Any

from tokenization.errors import InvalidMessages


def digest(*parts: object) -> bytes:
    """A 16-byte cache key for JSON-like values. The order of keys in objects counts: templates print it.

    Raises:
        InvalidMessages: a value is nested too deep.
    """
    try:
        return hashlib.blake2b(serialized(parts), digest_size=16).digest()
    except RecursionError as error:
        raise InvalidMessages("the messages, tools or template arguments are nested too deep") from error


def serialized(values: Any) -> bytes:
    """JSON-like values as bytes in which each text is found as UTF-8.

    Equal values with their keys in the same order give equal bytes.
    """
    try:
        # a tenth of the time of JSON; version 0, because later ones depend on which objects are identical
        return marshal.dumps(values, 0)
    except ValueError:
        text = json.dumps(values, ensure_ascii=False, default=repr)
        return text.encode("utf-8", "surrogatepass")
