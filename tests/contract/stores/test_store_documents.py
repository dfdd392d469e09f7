"""Documents of every store: whole values by their ids, within limits of bytes and age."""

import asyncio
import os

from proxy.history.store import Limits, Store
from tests.support.store_utils import opened


def _content(size: int) -> bytes:
    return b'{"x":"%s"}' % (b"x" * size)


async def test_documents_are_written_read_and_deleted_once(store: Store) -> None:
    documents = {"a": _content(1), "tenant/räume": _content(100_000), "c": b"{}"}
    for name, content in documents.items():
        await store.documents.keep(name, content)
    await store.documents.keep("a", _content(2))  # the first stays
    await store.evict()
    assert await store.documents.read(["tenant/räume", "a", "never", "c", "a"]) == documents
    deleted = await asyncio.gather(*(store.documents.delete("a") for _ in range(4)))
    assert sorted(deleted) == [False] * 3 + [True]
    assert await store.documents.read(["a", "c"]) == {"c": b"{}"}


async def test_the_oldest_documents_are_dropped_first(whole_url: str) -> None:
    async with opened(whole_url, Limits(document_bytes=5000)) as store:
        names = [f"d{number}" for number in range(10)]
        for name in names:
            await store.documents.keep(name, _content(1000))
        assert list(await store.documents.read(names)) == names[6:]
        # one over the limit displaces none
        await store.documents.keep("large", os.urandom(6000))
        assert list(await store.documents.read([*names, "large"])) == names[6:]
