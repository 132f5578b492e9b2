"""`mooncake.store`: upstream's store class over `StoreClient`.

Integers: 0 (or bytes read) is success, below 0 a code of `codes.py`. Lists have one a key. Pointers
are addresses of this process; memory need not be registered, but then costs more each time.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

from mooncake_py.compat import codes
from mooncake_py.compat.guard import guarded, nothing, one, per_key
from mooncake_py.compat.host_memory import MooncakeHostMemAllocator, bind_to_numa_node
from mooncake_py.compat.lifecycle import SetupOptions, open_client, options_of
from mooncake_py.compat.placement import (
    PlacementCalls,
    QueryTaskResponse,
    TaskStatus,
    TaskType,
)
from mooncake_py.compat.replicas import (
    BufferHandle,
    ObjectDataType,
    ReplicaDescriptor,
    ReplicateConfig,
    SoftPinAction,
)
from mooncake_py.compat.sessions import SessionCalls
from mooncake_py.compat.tensor_files import TensorFileCalls
from mooncake_py.errors import MooncakeError, UsageError
from mooncake_py.model import BATCH_MAX_KEYS
from mooncake_py.store.client import StoreClient
from mooncake_py.store.raw_memory import RawMemory

__all__ = [
    "BufferHandle",
    "MooncakeDistributedStore",
    "MooncakeHostMemAllocator",
    "ObjectDataType",
    "QueryTaskResponse",
    "ReplicaDescriptor",
    "ReplicateConfig",
    "SoftPinAction",
    "TaskStatus",
    "TaskType",
    "bind_to_numa_node",
]

log = logging.getLogger(__name__)

HEALTHY, NOT_SET_UP, MASTER_UNREACHABLE = 0, 1, 2
_HEALTH_MS = 2_000


_ONE = (
    "register_buffer", "unregister_buffer", "put", "put_parts", "put_batch", "put_from",
    "put_from_with_metadata", "upsert", "upsert_parts", "upsert_batch", "upsert_from", "get_into",
    "is_exist", "get_size", "remove", "remove_by_regex", "remove_all", "setup_dummy",
    "put_tensor", "pub_tensor", "put_tensor_from", "upsert_tensor", "upsert_pub_tensor",
    "put_tensor_with_tp", "pub_tensor_with_tp", "save_tensor_to_safetensor", "unmount_segment",
    "unmount_and_free_segment",
)  # fmt: skip
_PER_KEY = (
    "batch_put_from", "batch_put_from_multi_buffers", "batch_upsert_from", "batch_get_into",
    "batch_get_into_multi_buffers", "batch_is_exist", "batch_remove", "batch_get_session_start",
    "batch_get_session_end", "batch_get_into_multi_buffer_ranges", "batch_put_session_start",
    "batch_put_from_multi_buffer_ranges", "batch_put_session_end", "batch_put_session_revoke",
    "batch_put_tensor", "batch_pub_tensor", "batch_put_tensor_from", "batch_upsert_tensor",
    "batch_upsert_pub_tensor", "batch_put_tensor_with_tp",
)  # fmt: skip
_NONE = ("get_buffer", "get_tensor", "get_tensor_into", "get_tensor_with_tp",
    "load_tensor_from_safetensor",
)  # fmt: skip
_NONE_PER_KEY = (
    "batch_get_buffer", "batch_get_tensor", "batch_get_tensor_into", "batch_get_tensor_with_tp",
)  # fmt: skip


@guarded(
    {
        **dict.fromkeys(_ONE, one),
        **dict.fromkeys(_PER_KEY, per_key),
        **dict.fromkeys(_NONE, nothing(None)),
        **dict.fromkeys(_NONE_PER_KEY, nothing([None])),
        "get": nothing(b""),
        "get_batch": nothing([b""]),
        "create_copy_task": nothing(("", codes.INVALID_PARAMS)),
        "create_move_task": nothing(("", codes.INVALID_PARAMS)),
        "query_task": nothing((None, codes.INVALID_PARAMS)),
        "mount_segment": lambda *_, **__: {"ret": codes.INVALID_PARAMS, "segment_ids": []},
        "allocate_and_mount_segment": lambda *_, **__: {
            "ret": codes.INVALID_PARAMS,
            "segment_ids": [],
            "allocated_size": 0,
        },
        "get_into_ranges": lambda *_, **__: [],
        "get_replica_desc": lambda *_, **__: [],
        "batch_get_replica_desc": lambda *_, **__: {},
    }
)
class MooncakeDistributedStore(SessionCalls, TensorFileCalls, PlacementCalls):
    """Thread-safe, except that `setup` and `close` are for one thread at a time."""

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
            str(local_hostname), int(global_segment_size), str(protocol), str(master_server_addr),
            str(tenant_id), str(rdma_devices or ""),
        )  # fmt: skip
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
        self._options = wanted
        self._hostname = self._node.name if self._node is not None else wanted.local_hostname
        return codes.OK, ""

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """A client without memory of its own; `server_address` is the master's."""
        return self._set_up(lambda: SetupOptions("127.0.0.1", 0, "tcp", server_address))[0]

    def close(self) -> int:
        client, self._client = self._client, None
        node, self._node = self._node, None
        self._unmount_all()
        self._registered.clear()
        self._memory = RawMemory()
        self._written.clear()
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
        return self._put_from(keys, buffer_ptrs, sizes, config)

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

    def put_from_with_metadata(
        self,
        key: str,
        buffer_ptr: int,
        metadata_buffer_ptr: int,
        size: int,
        metadata_size: int,
        config: Any = None,
    ) -> int:
        """One object: the metadata, then the data."""
        return self.batch_put_from_multi_buffers(
            [key], [[metadata_buffer_ptr, buffer_ptr]], [[metadata_size, size]], config
        )[0]

    def upsert(self, key: str, value: Any, config: Any = None) -> int:
        """Replace; the former object is read until the new one is complete."""
        return self._put_all([key], [value], config, upsert=True)[0]

    def upsert_parts(self, key: str, *parts: Any, config: Any = None) -> int:
        return self._put_all([key], [list(parts)], config, upsert=True)[0]

    def upsert_batch(self, keys: Sequence[str], values: Sequence[Any], config: Any = None) -> int:
        """One code for all: the first that is not a success."""
        if len(keys) != len(values):
            return codes.INVALID_PARAMS
        stored = self._put_all(keys, values, config, upsert=True)
        return next((code for code in stored if code), codes.OK)

    def upsert_from(self, key: str, buffer_ptr: int, size: int, config: Any = None) -> int:
        return self.batch_upsert_from([key], [buffer_ptr], [size], config)[0]

    def batch_upsert_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: Any = None,
    ) -> list[int]:
        return self._put_from(keys, buffer_ptrs, sizes, config, upsert=True)

    def _put_from(
        self, keys: Sequence[str], ptrs: Sequence[int], sizes: Sequence[int], config: Any, *,
        upsert: bool = False,
    ) -> list[int]:  # fmt: skip
        if not len(keys) == len(ptrs) == len(sizes):
            return [codes.INVALID_PARAMS] * len(keys)
        values = [self._pieces([ptr], [size]) for ptr, size in zip(ptrs, sizes, strict=True)]
        return self._put_all(keys, values, config, upsert=upsert)

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
                    key: [
                        ReplicaDescriptor(length, home.node, on_disk=home.disk_id > 0)
                        for home in homes
                    ]
                    for key, length, homes in zip(
                        keys, session.lengths, session.homes(), strict=True
                    )
                    if homes
                }

        return self._try(ask, {})
