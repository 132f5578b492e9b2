"""`mooncake.store`: upstream's store class over `StoreClient`.

Integers: 0 (or bytes read) is success, below 0 a code of `codes.py`. Lists have one a key. Pointers
are addresses of this process; memory need not be registered, but then costs more each time.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mooncake_py.compat import codes
from mooncake_py.compat.host_memory import (
    MooncakeHostMemAllocator,
    bind_to_numa_node,
    descriptor_at,
)
from mooncake_py.compat.lifecycle import SetupOptions, open_client, options_of
from mooncake_py.compat.replicas import (
    BufferHandle,
    ObjectDataType,
    ReplicaDescriptor,
    ReplicateConfig,
    SoftPinAction,
    groups_of,
    policy_of,
)
from mooncake_py.errors import MooncakeError, ObjectExists, UsageError
from mooncake_py.model import BATCH_MAX_KEYS
from mooncake_py.store.client import StoreClient
from mooncake_py.store.node_process import Node
from mooncake_py.store.raw_memory import RawMemory, raw_view
from mooncake_py.store.regions import RegisteredMemory

__all__ = [
    "BufferHandle",
    "MooncakeDistributedStore",
    "MooncakeHostMemAllocator",
    "ObjectDataType",
    "ReplicaDescriptor",
    "ReplicateConfig",
    "SoftPinAction",
    "bind_to_numa_node",
]

T = TypeVar("T")

log = logging.getLogger(__name__)

HEALTHY, NOT_SET_UP, MASTER_UNREACHABLE = 0, 1, 2
_HEALTH_MS = 2_000
_PUT_MS = 5_000  # also for space to become free: callers want to hear soon that there is none


class MooncakeDistributedStore:
    """Thread-safe, except that `setup` and `close` are for one thread at a time."""

    def __init__(self) -> None:
        self._client: StoreClient | None = None
        self._node: Node | None = None
        self._hostname = ""
        self._memory = RawMemory()
        self._registered: dict[int, RegisteredMemory] = {}
        self._sessions: dict[str, int] = {}  # key -> times begun
        self._lock = threading.Lock()

    # --- lifecycle ---

    def setup(  # noqa: PLR0913, PLR0917 - upstream's signature
        self,
        local_hostname: Any,
        metadata_server: str | None = None,
        global_segment_size: int | None = None,
        local_buffer_size: int | None = None,
        protocol: str = "tcp",
        rdma_devices: str = "",
        master_server_addr: str = "",
        engine: object = None,
        enable_ssd_offload: bool = False,
        ssd_offload_path: str = "",
        tenant_id: str = "default",
        enable_client_http_server: bool = False,
        client_http_port: int = 9300,
    ) -> int:
        """Connect, and offer `global_segment_size` bytes of memory when above 0; or all of it as
        one dictionary. Raises RuntimeError for a dictionary that fails."""
        if isinstance(local_hostname, dict):
            code, why = self._set_up(lambda: options_of(local_hostname))
            if code:
                raise RuntimeError(f"mooncake_py: the store was not set up: {why}")
            return code
        if metadata_server is None or global_segment_size is None or local_buffer_size is None:
            raise TypeError("setup() takes a dictionary, or at least seven arguments")
        options = SetupOptions(
            str(local_hostname), int(global_segment_size), protocol, master_server_addr, tenant_id
        )
        return self._set_up(lambda: options)[0]

    def _set_up(self, options: Callable[[], SetupOptions]) -> tuple[int, str]:
        try:
            if self._client is not None:
                raise UsageError("the store is set up already")
            wanted = options()
            self._client, self._node = open_client(wanted)
        except MooncakeError as error:
            log.error("setup failed: %s", error)
            return codes.code_of(error), str(error)
        self._hostname = self._node.name if self._node is not None else wanted.local_hostname
        return codes.OK, ""

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """A client without memory of its own; `server_address` is the master's."""
        return self._set_up(lambda: SetupOptions("127.0.0.1", 0, "tcp", server_address))[0]

    def close(self) -> int:
        client, self._client = self._client, None
        node, self._node = self._node, None
        self._registered.clear()
        self._memory = RawMemory()
        if client is not None:
            client.close()
        if node is not None:
            node.stop()
        return codes.OK

    def health_check(self) -> int:
        if self._client is None:
            return NOT_SET_UP

        def ask(client: StoreClient) -> int:
            client.exists("health", timeout_ms=_HEALTH_MS)
            return HEALTHY

        return self._try(ask, MASTER_UNREACHABLE)

    def get_hostname(self) -> str:
        """The name of this process's own memory, for `preferred_segment`."""
        return self._hostname

    # --- memory ---

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        def register(client: StoreClient) -> int:
            if buffer_ptr in self._registered or size <= 0:
                raise UsageError("registered already, or no memory", address=buffer_ptr)
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
        return raw_view(address, nbytes)

    # --- writing ---

    def put(self, key: str, value: Any, config: Any = None) -> int:
        """Store a copy of the value. A key that holds an object keeps it, which is a success."""
        return self._put_all([key], [value], config)[0]

    def put_parts(self, key: str, *parts: Any, config: Any = None) -> int:
        return self._put_all([key], [list(parts)], config)[0]

    def put_batch(self, keys: Sequence[str], values: Sequence[Any], config: Any = None) -> int:
        """One code for all: the first that is not a success."""
        if len(keys) != len(values):
            return codes.INVALID_PARAMS
        return next((code for code in self._put_all(keys, values, config) if code), codes.OK)

    def put_from(self, key: str, buffer_ptr: int, size: int, config: Any = None) -> int:
        return self.batch_put_from([key], [buffer_ptr], [size], config)[0]

    def batch_put_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: Any = None,
    ) -> list[int]:
        return self.batch_put_from_multi_buffers(
            keys, [[each] for each in buffer_ptrs], [[each] for each in sizes], config
        )

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: Any = None,
    ) -> list[int]:
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes):
            return [codes.INVALID_PARAMS] * len(keys)
        values = [self._pieces(*each) for each in zip(all_buffer_ptrs, all_sizes, strict=True)]
        return self._put_all(keys, values, config)

    def upsert(self, key: str, value: Any, config: Any = None) -> int:
        """Replace; for a moment there is no object."""
        code = self.remove(key, force=True)
        return (
            code if code not in (codes.OK, codes.OBJECT_NOT_FOUND) else self.put(key, value, config)
        )

    def upsert_from(self, key: str, buffer_ptr: int, size: int, config: Any = None) -> int:
        pieces = self._pieces([buffer_ptr], [size])
        return codes.INVALID_PARAMS if pieces is None else self.upsert(key, pieces, config)

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

    def _put_all(self, keys: Sequence[str], values: Sequence[Any], config: Any) -> list[int]:
        """None among the values stands for one that cannot be right; nor can an empty one."""
        out = [codes.INVALID_PARAMS] * len(keys)
        good = [
            i
            for i, (key, value) in enumerate(zip(keys, values, strict=True))
            if key and value is not None and _nbytes(value)
        ]
        groups = groups_of(config, len(keys))

        def put(client: StoreClient) -> list[int]:
            outcomes = client.put_batch(
                [keys[i] for i in good],
                [values[i] for i in good],
                policy=policy_of(config),
                groups=[groups[i] for i in good] if groups else (),
                timeout_ms=_PUT_MS,
            )
            return [
                codes.OK if done is None or isinstance(done, ObjectExists) else codes.code_of(done)
                for done in outcomes
            ]

        for i, code in zip(good, self._codes(put, len(good)), strict=True):
            out[i] = code
        return out

    # --- reading ---

    def get(self, key: str) -> bytes:
        """Empty for a miss and for a failure."""
        return self.get_batch([key])[0]

    def get_batch(self, keys: Sequence[str]) -> list[bytes]:
        def read(client: StoreClient) -> list[bytes]:
            found = client.get_batch(keys)
            return [each if isinstance(each, bytes) else b"" for each in found]

        return self._try(read, [b""] * len(keys))

    def get_buffer(self, key: str) -> BufferHandle | None:
        return self.batch_get_buffer([key])[0]

    def batch_get_buffer(self, keys: Sequence[str]) -> list[BufferHandle | None]:
        """One handle a key, None for a miss."""

        def read(client: StoreClient) -> list[BufferHandle | None]:
            with client.session(keys) as session:
                lengths = session.lengths
                present = [i for i, there in enumerate(session.present) if there]
            handles = {i: BufferHandle(lengths[i]) for i in present}
            done = client.get_batch([keys[i] for i in present], [handles[i] for i in present])
            for i, outcome in zip(present, done, strict=True):
                if outcome != lengths[i]:
                    del handles[i]
            return [handles.get(i) for i in range(len(keys))]

        return self._try(read, [None] * len(keys))

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        return self.batch_get_into([key], [buffer_ptr], [size])[0]

    def batch_get_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        return self.batch_get_into_multi_buffers(
            keys, [[each] for each in buffer_ptrs], [[each] for each in sizes]
        )

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """Bytes of each object, spread over its buffers in order, or a code."""
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes):
            return [codes.INVALID_PARAMS] * len(keys)
        out = [codes.INVALID_PARAMS] * len(keys)
        targets = [self._pieces(*each) for each in zip(all_buffer_ptrs, all_sizes, strict=True)]
        good = [i for i, target in enumerate(targets) if keys[i] and target]

        def read(client: StoreClient) -> list[int]:
            return codes.numbers(
                client.get_batch([keys[i] for i in good], [targets[i] for i in good])
            )

        for i, code in zip(good, self._codes(read, len(good)), strict=True):
            out[i] = code
        return out

    # --- sessions: parts of many objects, without asking the master again ---

    def batch_get_session_start(self, keys: Sequence[str]) -> list[int]:
        def start(client: StoreClient) -> list[int]:
            with client.session(keys) as session:
                return [codes.OK if there else codes.OBJECT_NOT_FOUND for there in session.present]

        return self._codes(start, len(keys))

    def batch_get_session_end(self, keys: Sequence[str]) -> list[int]:
        return [codes.OK] * len(keys)

    def batch_get_into_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        all_offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Parts of each object, one a buffer, from these offsets. Sums of bytes, or a code."""
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes) == len(all_offsets):
            return [codes.INVALID_PARAMS] * len(keys)
        names: list[str] = []
        targets: list[Any] = []
        ranges: list[tuple[int, int]] = []
        owners: list[int] = []
        out = [0] * len(keys)
        for i, (ptrs, sizes, offsets) in enumerate(
            zip(all_buffer_ptrs, all_sizes, all_offsets, strict=True)
        ):
            if not keys[i] or not len(ptrs) == len(sizes) == len(offsets):
                out[i] = codes.INVALID_PARAMS
                continue
            for ptr, size, offset in zip(ptrs, sizes, offsets, strict=True):
                pieces = self._pieces([ptr], [size])
                if not pieces:
                    out[i] = codes.INVALID_PARAMS
                    continue
                names.append(keys[i])
                targets.append(pieces[0])
                ranges.append((int(offset), int(size)))
                owners.append(i)
        read = self._codes(
            lambda client: codes.numbers(client.get_batch(names, targets, ranges=ranges)),
            len(names),
        )
        for i, got in zip(owners, read, strict=True):
            out[i] = out[i] if out[i] < 0 else got if got < 0 else out[i] + got
        return out

    # --- the rest ---

    def is_exist(self, key: str) -> int:
        return self.batch_is_exist([key])[0]

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        def ask(client: StoreClient) -> list[int]:
            found = client.exists(keys)
            return [int(there) for there in found]  # type: ignore[union-attr]  # a list for a list

        if not all(keys):
            return [codes.INVALID_PARAMS] * len(keys)
        return self._codes(ask, len(keys))

    def get_size(self, key: str) -> int:
        def ask(client: StoreClient) -> int:
            with client.session([key]) as session:
                return session.lengths[0] if session.present[0] else codes.OBJECT_NOT_FOUND

        return self._code(ask)

    def remove(self, key: str, force: bool = False) -> int:
        return self.batch_remove([key], force)[0]

    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        def remove(client: StoreClient) -> list[int]:
            present = client.exists(keys)
            outcomes = client.remove(list(keys), force=force)
            return [
                codes.code_of(done)
                if done is not None
                else (codes.OK if there else codes.OBJECT_NOT_FOUND)
                for done, there in zip(outcomes, present, strict=True)  # type: ignore[arg-type]  # lists for lists
            ]

        return self._codes(remove, len(keys))

    def remove_by_regex(self, regex: str, force: bool = False) -> int:
        """How many objects were removed, or a code."""
        try:
            pattern = re.compile(regex)
        except re.error:
            return codes.INVALID_PARAMS
        return self._remove_where(lambda key: pattern.search(key) is not None, force)

    def remove_all(self, force: bool = False) -> int:
        """How many objects were removed. Without force, those being read stay."""
        return self._remove_where(lambda _: True, force)

    def _remove_where(self, wanted: Callable[[str], bool], force: bool) -> int:
        def remove(client: StoreClient) -> int:
            keys = [info.key for info in client.list() if wanted(info.key)]
            removed = 0
            for start in range(0, len(keys), BATCH_MAX_KEYS):
                outcomes = client.remove(keys[start : start + BATCH_MAX_KEYS], force=force)
                removed += sum(done is None for done in outcomes)  # type: ignore[union-attr]  # a list for a list
            return removed

        return self._code(remove)

    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        return self.batch_get_replica_desc([key]).get(key, [])

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        def ask(client: StoreClient) -> dict[str, list[ReplicaDescriptor]]:
            with client.session(keys) as session:
                return {
                    key: [ReplicaDescriptor(length, self._hostname)]
                    for key, length, there in zip(
                        keys, session.lengths, session.present, strict=True
                    )
                    if there
                }

        return self._try(ask, {})

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


def _nbytes(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(map(_nbytes, value))
    if hasattr(value, "data_ptr"):
        return int(value.numel() * value.element_size())
    return memoryview(value).nbytes
