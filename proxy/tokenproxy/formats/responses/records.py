"""Responses and summaries as they are stored, and the items of a conversation read from them.

A stored response is one document: the response object, the input items of its request, and the ids of the
responses before it. So a conversation is read in two steps, and no item is stored twice. It does not use the
record of turns, which may be evicted or not recorded, and hold no ids and types of items.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import msgspec

from tokenproxy.base.errors import BadRequest
from tokenproxy.formats.responses.items import (
    COMPACTIONS,
    Item,
    compaction_of,
    is_response_id,
    item_kind,
    response_id,
    turn_of,
)
from tokenproxy.formats.responses.request import ResponsesRequest

Read = Callable[[Iterable[str]], Awaitable[dict[str, bytes]]]
"""Reads documents by their names."""
_REFERENCE = "item_reference"
_MOST_NAMES = 2048
"""Stored items that one request may name."""
_SHOWN = 100
"""Most characters of a client's id in an error message."""


class ResponseRecord(msgspec.Struct):
    """A stored response."""

    response: msgspec.Raw
    input: list[Item]
    """Of its request, references resolved."""
    chain: list[str]
    """Ids of the responses before it, the first one first."""


class Summary(msgspec.Struct):
    """A stored summary of a conversation."""

    text: str


class _Output(msgspec.Struct):
    output: list[Item]


class Recalled(msgspec.Struct, frozen=True):
    """What a request names of what was stored."""

    earlier: list[Item] = []
    """The items of the previous responses."""
    chain: list[str] = []
    """The ids of the previous responses, the first one first."""
    items: dict[str, Item] = {}
    """The referenced items by their ids."""
    summaries: dict[str, str] = {}
    """The summaries by the ids of their compaction items."""


def output_of(record: ResponseRecord) -> list[Item]:
    """The output items of a stored response."""
    return msgspec.json.decode(record.response, type=_Output).output


async def recall(request: ResponsesRequest, read: Read) -> Recalled:
    """Read what a request names.

    Raises:
        BadRequest: it is not stored; `param` names it.
    """
    name = request.read.previous_response_id
    responses = {response_id(turn) for item in request.input if (turn := _referenced(item))}
    if name is not None and is_response_id(name):
        responses.add(name)
    asked = {*responses, *_compactions(request.input)}
    if len(asked) > _MOST_NAMES:
        raise BadRequest.of("input", f"refers to {len(asked)} stored items, at most {_MOST_NAMES} allowed")
    documents = await read(asked)
    chain: list[str] = []
    records: list[ResponseRecord] = []
    if name is not None:
        previous = _record(documents, name)
        before = await read(previous.chain) if previous.chain else {}
        records = [*(_record(before, each) for each in previous.chain), previous]
        chain = [*previous.chain, name]
    earlier = _conversation(records)
    if unread := set(_compactions(earlier)) - documents.keys():
        documents |= await read(unread)
    referenced = [_record(documents, each) for each in responses if each in documents]
    items = {item.get("id"): item for item in earlier}
    items |= {item.get("id"): item for record in referenced for item in (*record.input, *output_of(record))}
    return Recalled(
        earlier,
        chain,
        {key: item for key, item in items.items() if isinstance(key, str)},
        {key: _text(content) for key, content in documents.items() if not key.startswith("resp_")},
    )


def _conversation(records: Iterable[ResponseRecord]) -> list[Item]:
    """The items of responses that follow each other. A compaction stands for all before it but the user's
    messages, as in the output of `/v1/responses/compact`."""
    items: list[Item] = []
    for record in records:
        output = output_of(record)
        items += record.input
        if any(item_kind(item, "output") in COMPACTIONS for item in output):
            items = [item for item in items if item.get("role") == "user"]
        items += output
    return items


def resolved(items: list[Item], known: Mapping[str, Item]) -> list[Item]:
    """Return items with each reference replaced by the stored item that it names.

    Raises:
        BadRequest: a referenced item is not stored.
    """
    found: list[Item] = []
    for index, item in enumerate(items):
        if item_kind(item, f"input[{index}]") != _REFERENCE:
            found.append(item)
        elif isinstance(name := item.get("id"), str) and name in known:
            found.append(known[name])
        else:
            raise BadRequest.of(f"input[{index}].id", "names no stored item: send the item itself")
    return found


def _record(documents: Mapping[str, bytes], name: str) -> ResponseRecord:
    if name not in documents or not is_response_id(name):
        raise BadRequest(
            f"Previous response with id '{name[:_SHOWN]}' not found: never stored, deleted, or too old",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return msgspec.json.decode(documents[name], type=ResponseRecord)


def _text(content: bytes) -> str:
    return msgspec.json.decode(content, type=Summary).text


def _referenced(item: Item) -> str | None:
    """The turn whose response holds the item that a reference names; None if it is no reference."""
    return turn_of(item.get("id")) if item_kind(item, "input") == _REFERENCE else None


def _compactions(items: Iterable[Item]) -> list[str]:
    """The ids of the compaction items whose summaries are needed."""
    wanted: list[Any] = [
        compaction_of(item.get("encrypted_content"))
        for item in items
        if item_kind(item, "input") in COMPACTIONS
    ]
    return [name for name in wanted if name is not None]
