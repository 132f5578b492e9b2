"""Upstream's client for `metadata.py`: JSON lines in, nanoseconds out. Standard library only, for
an interpreter that has its wheel.

    python -m benchmarks.metadata_upstream MASTER HOST SEGMENT_BYTES

    {"do": "exists" | "locate" | "put" | "fill", "keys": [...]} -> {verb: ns}
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable

from mooncake.store import MooncakeDistributedStore, ReplicateConfig

_BUFFER_BYTES = 16 << 20


class Store:
    def __init__(self, master: str, host: str, segment_bytes: int) -> None:
        self._store = MooncakeDistributedStore()
        code = self._store.setup(
            host, "P2PHANDSHAKE", segment_bytes, _BUFFER_BYTES, "tcp", "", master
        )
        if code:
            raise RuntimeError(f"setup answered {code}")
        self._config = ReplicateConfig()
        self._config.preferred_segment = self._store.get_hostname()
        self._memory = ctypes.create_string_buffer(4096)
        self._address = ctypes.addressof(self._memory)
        self._store.register_buffer(self._address, 4096)

    def exists(self, keys: list[str]) -> dict[str, int]:
        if len(keys) == 1:
            ns, present = _timed(lambda: [self._store.is_exist(keys[0])])
        else:
            ns, present = _timed(lambda: self._store.batch_is_exist(keys))
        if present != [1] * len(keys):
            raise RuntimeError("a key is missing")
        return {"exists": ns}

    def locate(self, keys: list[str]) -> dict[str, int]:
        if len(keys) == 1:
            ns, _ = _timed(lambda: self._store.get_replica_desc(keys[0]))
            return {"locate": ns}
        ns, found = _timed(lambda: self._store.batch_get_replica_desc(keys))
        if len(found) != len(set(keys)):
            raise RuntimeError("a key has no placement")
        return {"locate": ns}

    def put(self, keys: list[str]) -> dict[str, int]:
        found = self.fill(keys)
        if any(self._store.batch_remove(keys, True)):
            raise RuntimeError("a key was not removed")
        return found

    def fill(self, keys: list[str]) -> dict[str, int]:
        addresses, sizes = [self._address] * len(keys), [1] * len(keys)
        if len(keys) == 1:
            ns, code = _timed(lambda: self._store.put_from(keys[0], self._address, 1, self._config))
            codes = [code]
        else:
            ns, codes = _timed(
                lambda: self._store.batch_put_from(keys, addresses, sizes, self._config)
            )
        if any(codes):
            raise RuntimeError(f"a put answered {next(filter(None, codes))}")
        return {"put": ns}


def _timed(call: Callable[[], object]) -> tuple[int, object]:
    began = time.perf_counter_ns()
    found = call()
    return time.perf_counter_ns() - began, found


def main() -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the library prints goes to the log
    store = Store(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    print(json.dumps({"ready": True}), file=out)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            reply = getattr(store, command["do"])(command["keys"])
        except Exception as error:  # whoever asked reports it
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=out)


if __name__ == "__main__":
    main()
