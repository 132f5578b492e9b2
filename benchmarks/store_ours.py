"""Our client: {"master": "host:port", "transports": ["shm"], "tenant": "shm"}."""

from __future__ import annotations

from typing import Any

from benchmarks.worker import Batch
from mooncake_py import StoreClient


class Ours:
    def __init__(self, settings: dict, nbytes: int) -> None:
        self._store = StoreClient(
            settings["master"],
            tenant=settings["tenant"],
            transports=settings["transports"],
            timeout_ms=30_000,
        )
        self._registered = self._store.alloc(nbytes)
        self.memory = self._registered.view()[:nbytes]

    def put(self, batch: Batch) -> None:
        if batch.count == 1:
            self._store.put(batch.keys[0], batch.views[0])
        else:
            _raise_first(self._store.put_batch(batch.keys, batch.views))

    def get(self, batch: Batch) -> None:
        if batch.count == 1:
            self._store.get(batch.keys[0], batch.views[0])
        else:
            _raise_first(self._store.get_batch(batch.keys, batch.views))

    def exists(self, batch: Batch) -> None:
        if not all(self._store.exists(batch.keys)):
            raise RuntimeError("a key is missing")

    def remove(self, batch: Batch) -> None:
        _raise_first(self._store.remove(batch.keys, force=True))

    def close(self) -> None:
        self._store.close()


def _raise_first(outcomes: list[Any]) -> None:
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome


def open_store(settings: dict, nbytes: int) -> Ours:
    return Ours(settings, nbytes)
