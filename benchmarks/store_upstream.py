"""Upstream's client, in an interpreter that has its wheel (standard library only otherwise).

{"master": "host:port", "host": h, "segment_bytes": n, "dummy": "host:port" or ""}
`segment_bytes` 0: a pure client; else it also offers that much memory ("local", and the storage
process of "tcp"). `dummy`: attach to a standalone client there, through its shared memory.
"""

from __future__ import annotations

import ctypes

from mooncake.store import MooncakeDistributedStore, ReplicateConfig

from benchmarks.worker import Batch, address_of, plain_memory

_LOCAL_BUFFER_BYTES = 16 << 20


class Upstream:
    def __init__(self, settings: dict, nbytes: int) -> None:
        self._store = MooncakeDistributedStore()
        self._config = ReplicateConfig()
        if settings["dummy"]:
            pool = nbytes + _LOCAL_BUFFER_BYTES
            _zero(self._store.setup_dummy(pool, _LOCAL_BUFFER_BYTES, settings["dummy"]))
            address = self._store.alloc_from_mem_pool(nbytes)
            self.memory = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
            _zero(self._store.register_buffer(address, nbytes))
            return
        _zero(
            self._store.setup(
                settings["host"],
                "P2PHANDSHAKE",
                settings["segment_bytes"],
                _LOCAL_BUFFER_BYTES,
                "tcp",
                "",
                settings["master"],
            )
        )
        if settings["segment_bytes"]:
            self._config.preferred_segment = self._store.get_hostname()
        self.memory = plain_memory(nbytes)
        _zero(self._store.register_buffer(address_of(self.memory), nbytes))

    def put(self, batch: Batch) -> None:
        if batch.count == 1:
            _zero(
                self._store.put_from(batch.keys[0], batch.addresses[0], batch.nbytes, self._config)
            )
        else:
            for code in self._store.batch_put_from(
                batch.keys, batch.addresses, batch.sizes, self._config
            ):
                _zero(code)

    def get(self, batch: Batch) -> None:
        if batch.count == 1:
            got = [self._store.get_into(batch.keys[0], batch.addresses[0], batch.nbytes)]
        else:
            got = self._store.batch_get_into(batch.keys, batch.addresses, batch.sizes)
        if got != batch.sizes:
            raise RuntimeError(f"a get answered {got[0]} and not {batch.nbytes}")

    def exists(self, batch: Batch) -> None:
        if batch.count == 1:
            present = [self._store.is_exist(batch.keys[0])]
        else:
            present = self._store.batch_is_exist(batch.keys)
        if present != [1] * batch.count:
            raise RuntimeError("a key is missing")

    def remove(self, batch: Batch) -> None:
        for code in self._store.batch_remove(batch.keys, True):
            _zero(code)

    def close(self) -> None:
        self._store.close()


def _zero(code: int) -> None:
    if code != 0:
        raise RuntimeError(f"upstream answered {code}")


def open_store(settings: dict, nbytes: int) -> Upstream:
    return Upstream(settings, nbytes)
