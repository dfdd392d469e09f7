"""The documents of a guarded store: calls are limited in time, and skipped while the store fails."""

from typing import cast

import pytest

from proxy.history.store import Store, StoreError, StoreSkipped
from proxy.metrics import Metrics
from proxy.stores.guarded import GuardedStore
from tests.contract.stores.patient import Patient


async def test_calls_are_passed_on_and_skipped_while_the_store_fails() -> None:
    inner = Patient()
    store = GuardedStore(cast(Store, inner), Metrics())
    await store.open()
    await store.documents.keep("a", b"{}")
    assert await store.documents.read(["a"]) == {"a": b"{}"}
    assert await store.documents.delete("a")
    inner.errors = dict.fromkeys(("document_read", "find"), StoreError("out of order"))
    for _ in range(3):
        with pytest.raises(StoreError):
            await store.documents.read(["a"])
    with pytest.raises(StoreSkipped):
        await store.documents.read(["a"])
    inner.errors.clear()
    await store.aclose()
