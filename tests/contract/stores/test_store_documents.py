"""Documents of every store: whole values by their ids, within limits of bytes and age."""

import asyncio
import os

import pytest

from proxy.history.store import Evicted, Limits, Store, StoreError
from proxy.stores.packed import pack_document, unpack_document
from tests.support.store_utils import opened


def _content(size: int, letter: str = "x") -> bytes:
    """A JSON object that compression leaves alone, because it is short, or of one letter."""
    return b'{"x":"%s"}' % (letter.encode() * size)


async def test_documents_are_written_read_and_deleted_once(store: Store) -> None:
    documents = {"a": _content(1), "tenant/räume": _content(100_000, "y"), "c": b"{}"}
    for name, content in documents.items():
        await store.documents.keep(name, content)
    await store.documents.keep("a", _content(2))
    await store.evict()
    assert await store.documents.read(["tenant/räume", "a", "never", "c", "a"]) == documents
    assert await store.documents.read([]) == {}
    deleted = await asyncio.gather(*(store.documents.delete("a") for _ in range(4)))
    assert sorted(deleted) == [False] * 3 + [True]
    assert await store.documents.read(["a", "c"]) == {"c": b"{}"}


async def test_the_oldest_documents_are_dropped_first(whole_url: str) -> None:
    async with opened(whole_url, Limits(document_bytes=5000)) as store:
        names = [f"d{number}" for number in range(10)]
        for name in names:
            await store.documents.keep(name, _content(1000))
        assert list(await store.documents.read(names)) == names[6:]
        await store.documents.delete("d6")
        await store.documents.keep("more", _content(1000))
        assert list(await store.documents.read([*names, "more"])) == [*names[7:], "more"]
        # one over the limit displaces none
        await store.documents.keep("large", os.urandom(6000))
        assert list(await store.documents.read([*names, "more", "large"])) == [*names[7:], "more"]


async def test_one_document_may_displace_many(url: str) -> None:
    async with opened(url, Limits(document_bytes=40_000)) as store:
        names = [f"d{number}" for number in range(600)]
        await asyncio.gather(*(store.documents.keep(name, b"{}") for name in names))
        assert len(await store.documents.read(names)) == 600
        large = b'{"x":"%s"}' % bytes(range(48, 91)) * 900  # compressed, it is still some bytes
        await store.documents.keep("large", large)
        assert await store.documents.read(["large"]) == {"large": large}


@pytest.mark.parametrize("limits", [Limits(document_bytes=0), Limits(max_age_s=-1.0)])
async def test_documents_beyond_a_limit_are_dropped(url: str, limits: Limits) -> None:
    async with opened(url, limits) as store:
        await asyncio.gather(*(store.documents.keep(f"d{number}", b"{}") for number in range(600)))
        assert await store.documents.read(["d1"]) == {}
        assert await store.evict() == Evicted()
        assert not await store.documents.delete("d599")


async def test_documents_are_those_of_all_processes(shared_url: str) -> None:
    async with opened(shared_url) as first, opened(shared_url) as second:
        await first.documents.keep("a", _content(9))
        await first.documents.keep("b", b"{}")
        assert await second.documents.read(["a"]) == {"a": _content(9)}
        await second.documents.delete("a")
        assert await first.documents.read(["a"]) == {}
    async with opened(shared_url) as later:
        assert await later.documents.read(["a", "b"]) == {"b": b"{}"}


async def test_a_damaged_document_is_an_error_of_the_store() -> None:
    packed = await pack_document(_content(10_000))
    assert len(packed) < 1000 and unpack_document(packed) == _content(10_000)
    with pytest.raises(StoreError, match="cannot be read"):
        unpack_document(packed[:-5])
