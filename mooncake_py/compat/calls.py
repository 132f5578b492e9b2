"""What all calls of `mooncake.store` stand on: the client, memory by address, codes for errors."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mooncake_py.compat import codes
from mooncake_py.compat.host_memory import descriptor_at
from mooncake_py.compat.replicas import groups_of, policy_of
from mooncake_py.errors import MooncakeError, ObjectExists, UsageError
from mooncake_py.store.client import StoreClient
from mooncake_py.store.node_process import Node
from mooncake_py.store.raw_memory import RawMemory, is_mapped, raw_view
from mooncake_py.store.regions import RegisteredMemory

T = TypeVar("T")

log = logging.getLogger(__name__)

PUT_MS = 5_000  # also for space to become free: callers want to hear soon that there is none


class StoreCalls:
    """What the parts of `MooncakeDistributedStore` share. Thread-safe."""

    def __init__(self) -> None:
        self._client: StoreClient | None = None
        self._node: Node | None = None
        self._hostname = ""
        self._memory = RawMemory()
        self._registered: dict[int, RegisteredMemory] = {}
        self._lock = threading.Lock()

    # --- memory ---

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        def register(client: StoreClient) -> int:
            if buffer_ptr in self._registered or size <= 0 or not is_mapped(buffer_ptr, size):
                raise UsageError(
                    "registered already, or no memory of this process", address=buffer_ptr
                )
            view = self._memory.add(buffer_ptr, size)
            if view is None:
                raise UsageError("part of memory that is registered already")
            try:
                fd = descriptor_at(buffer_ptr, size)
                self._registered[buffer_ptr] = client.register(view, fd=fd)
            except MooncakeError:
                self._memory.drop(buffer_ptr)
                raise
            return codes.OK

        with self._lock:
            return self._code(register)

    def unregister_buffer(self, buffer_ptr: int) -> int:
        with self._lock:
            memory = self._registered.pop(buffer_ptr, None)
            if memory is None:
                return codes.INVALID_PARAMS
            self._memory.drop(buffer_ptr)
        memory.close()
        return codes.OK

    def _view(self, address: int, nbytes: int) -> memoryview:
        if self._memory.covers(address, nbytes):
            return self._memory.slice(address, nbytes)
        if not is_mapped(address, nbytes):
            raise UsageError("this is no memory of this process", address=address, nbytes=nbytes)
        return raw_view(address, nbytes)

    # --- objects ---

    def _pieces(self, ptrs: Sequence[int], sizes: Sequence[int]) -> list[memoryview] | None:
        """The memory of one object, or None when it cannot be right."""
        if len(ptrs) != len(sizes):
            return None
        try:
            return [
                self._view(int(ptr), int(size))
                for ptr, size in zip(ptrs, sizes, strict=True)
                if int(size)
            ]
        except UsageError:
            return None

    def _put_all(
        self, keys: Sequence[str], values: Sequence[Any], config: Any, *, upsert: bool = False
    ) -> list[int]:
        """None among the values stands for one that cannot be right; nor can an empty one. A key
        that exists is a success, and without `upsert` keeps what it has; with it there is another
        writer who is just storing, and that is said."""
        out = [codes.INVALID_PARAMS] * len(keys)
        good = [
            i
            for i, (key, value) in enumerate(zip(keys, values, strict=True))
            if key and value is not None and nbytes_of(value)
        ]
        groups = groups_of(config, len(keys))

        def put(client: StoreClient) -> list[int]:
            outcomes = client.put_batch(
                [keys[i] for i in good],
                [values[i] for i in good],
                policy=policy_of(config),
                groups=[groups[i] for i in good] if groups else (),
                upsert=upsert,
                timeout_ms=PUT_MS,
            )
            return [
                codes.OK
                if done is None or (isinstance(done, ObjectExists) and not upsert)
                else codes.code_of(done)
                for done in outcomes
            ]

        for i, code in zip(good, self._codes(put, len(good)), strict=True):
            out[i] = code
        return out

    # --- codes instead of exceptions ---

    def _try(self, call: Callable[[StoreClient], T], otherwise: T) -> T:
        client = self._client
        if client is None:
            return otherwise
        try:
            return call(client)
        except MooncakeError as error:
            log.warning("%s", error)
            return otherwise

    def _code(self, call: Callable[[StoreClient], int]) -> int:
        client = self._client
        if client is None:
            return codes.INVALID_PARAMS
        try:
            return int(call(client))
        except MooncakeError as error:
            log.warning("%s", error)
            return codes.code_of(error)

    def _codes(self, call: Callable[[StoreClient], list[int]], count: int) -> list[int]:
        client = self._client
        if client is None:
            return [codes.INVALID_PARAMS] * count
        try:
            return call(client)
        except MooncakeError as error:
            log.warning("%s", error)
            return [codes.code_of(error)] * count


def nbytes_of(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(map(nbytes_of, value))
    if hasattr(value, "data_ptr"):
        return int(value.numel() * value.element_size())
    return memoryview(value).nbytes
