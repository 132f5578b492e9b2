"""Parts of objects: sessions that read and write layer by layer, and ranges of many objects.

A reading session remembers nothing of its own: the client keeps what the master said at its start
and reads by that, so parts cost no master call while the leases last. A writing session collects
in memory of this process (`open_puts.py`); its objects exist once it has ended, all together, and
it may be revoked until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mooncake_py.compat import codes
from mooncake_py.compat.calls import StoreCalls
from mooncake_py.compat.open_puts import BYTES_MAX, OpenPuts
from mooncake_py.errors import UsageError
from mooncake_py.store.client import StoreClient


class SessionCalls(StoreCalls):
    def __init__(self) -> None:
        super().__init__()
        self._written = OpenPuts()

    # --- reading ---

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
        all_src_offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Parts of each object, one a buffer, from these offsets. Sums of bytes, or a code."""
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes) == len(all_src_offsets):
            return [codes.INVALID_PARAMS] * len(keys)
        out = [0] * len(keys)
        wanted: list[tuple[str, int, int, int]] = []
        owners: list[int] = []
        for i, parts in enumerate(zip(all_buffer_ptrs, all_sizes, all_src_offsets, strict=True)):
            if not keys[i] or len({len(each) for each in parts}) != 1:
                out[i] = codes.INVALID_PARAMS
                continue
            wanted += [(keys[i], *part) for part in zip(*parts, strict=True)]
            owners += [i] * len(parts[0])
        for i, got in zip(owners, self._read_ranges(wanted), strict=True):
            out[i] = out[i] if out[i] < 0 else got if got < 0 else out[i] + got
        return out

    def get_into_ranges(
        self,
        buffer_ptrs: Sequence[int],
        all_keys: Sequence[Sequence[str]],
        all_dst_offsets: Sequence[Sequence[Sequence[int]]],
        all_src_offsets: Sequence[Sequence[Sequence[int]]],
        all_sizes: Sequence[Sequence[Sequence[int]]],
    ) -> list[list[list[int]]]:
        """Into each buffer parts of several objects: bytes or a code for each range of each key of
        each buffer, nested as the arguments are."""
        shape = [
            [[codes.INVALID_PARAMS] * len(ranges) for ranges in keys_sizes]
            for keys_sizes in all_sizes
        ]
        wanted: list[tuple[str, int, int, int]] = []
        places: list[tuple[int, int, int]] = []
        nested = zip(
            buffer_ptrs, all_keys, all_dst_offsets, all_src_offsets, all_sizes, strict=True
        )
        for b, (base, keys, *by_key) in enumerate(nested):
            for k, (key, to, source, sizes) in enumerate(zip(keys, *by_key, strict=True)):
                for r, part in enumerate(zip(to, source, sizes, strict=True)):
                    wanted.append((key, base + part[0], part[2], part[1]))
                    places.append((b, k, r))
        for (b, k, r), got in zip(places, self._read_ranges(wanted), strict=True):
            shape[b][k][r] = got
        return shape

    def _read_ranges(self, wanted: Sequence[tuple[str, int, int, int]]) -> list[int]:
        """(key, address, bytes, offset in the object) -> bytes, or a code."""
        out = [codes.INVALID_PARAMS] * len(wanted)
        targets = [self._pieces([address], [nbytes]) for _, address, nbytes, _ in wanted]
        good = [i for i, pieces in enumerate(targets) if wanted[i][0] and pieces]

        def read(client: StoreClient) -> list[int]:
            names = [wanted[i][0] for i in good]
            ranges = [(int(wanted[i][3]), int(wanted[i][2])) for i in good]
            into = [pieces[0] for i in good if (pieces := targets[i])]
            return codes.numbers(client.get_batch(names, into, ranges=ranges))

        for i, got in zip(good, self._codes(read, len(good)), strict=True):
            out[i] = got
        return out

    # --- writing ---

    def batch_put_session_start(
        self, keys: Sequence[str], sizes: Sequence[int], config: Any = None
    ) -> list[int]:
        """Begin objects of these sizes. A key that is being written already is begun anew."""
        if len(keys) != len(sizes):
            return [codes.INVALID_PARAMS] * len(keys)
        if self._client is None:
            return [codes.INVALID_PARAMS] * len(keys)
        out = []
        for key, size in zip(keys, sizes, strict=True):
            if not isinstance(key, str) or not key or not 0 < int(size) <= BYTES_MAX:
                out.append(codes.INVALID_PARAMS)
                continue
            begun = self._written.begin(key, int(size), config)
            out.append(codes.OK if begun else codes.NO_AVAILABLE_HANDLE)
        return out

    def batch_put_from_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        all_dst_offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Write parts of objects that were begun; what is read is copied before this returns."""
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes) == len(all_dst_offsets):
            return [codes.INVALID_PARAMS] * len(keys)
        return [
            self._write_parts(*each)
            for each in zip(keys, all_buffer_ptrs, all_sizes, all_dst_offsets, strict=True)
        ]

    def _write_parts(
        self, key: str, ptrs: Sequence[int], sizes: Sequence[int], offsets: Sequence[int]
    ) -> int:
        begun = self._written.find(key)
        if begun is None:
            return codes.OBJECT_NOT_FOUND
        if not len(ptrs) == len(sizes) == len(offsets):
            return codes.INVALID_PARAMS
        value = begun.value
        moved = 0
        try:
            parts = [
                (self._view(int(ptr), int(size)), int(offset))
                for ptr, size, offset in zip(ptrs, sizes, offsets, strict=True)
            ]
        except UsageError:
            return codes.INVALID_PARAMS
        if any(offset < 0 or offset + len(part) > value.nbytes for part, offset in parts):
            return codes.INVALID_PARAMS
        for part, offset in parts:
            value[offset : offset + len(part)] = part
            moved += len(part)
        return moved

    def batch_put_session_end(self, keys: Sequence[str]) -> list[int]:
        """The objects can be read now. What was never written is zeros."""
        begun = self._written.take(keys)
        out = [codes.OBJECT_NOT_FOUND] * len(keys)
        begun_alike: dict[int, tuple[Any, list[int], list[Any]]] = {}  # by the config's identity
        for i, each in enumerate(begun):
            if each is not None:
                _, which, values = begun_alike.setdefault(id(each.config), (each.config, [], []))
                which.append(i)
                values.append(each.value)
        for config, which, values in begun_alike.values():
            stored = self._put_all([keys[i] for i in which], values, config)
            for i, code in zip(which, stored, strict=True):
                out[i] = code
        return out

    def batch_put_session_revoke(self, keys: Sequence[str]) -> list[int]:
        return [
            codes.OBJECT_NOT_FOUND if each is None else codes.OK
            for each in self._written.take(keys)
        ]
