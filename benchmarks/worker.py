"""The loop of one contender: commands come in as JSON lines, timings go out.

    {"do": "fill", "tag": t, "nbytes": n, "count": c, "sets": s, "owner": o}
    {"do": "run", "verb": "get"|"put"|"exists", ... the same fields, "repeat": r, "threads": t}
                                                                                 -> {"ns": [...]}
    {"do": "drop", ... the same fields}
    {"do": "quit"}

A store module has `open_store(settings, nbytes)`, whose result has `memory` (`nbytes`, registered
where that means something), `put(batch)`, `get(batch)`, `exists(batch)`, `remove(batch)`, which
raise when anything fails, and `close()`. Standard library only: this file also runs in upstream's
environment. `python -m benchmarks.worker MODULE SETTINGS BATCH_BYTES`.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import os
import sys
import threading
import time
from typing import Any

KEY = "bench-{tag}-{owner:02d}-{set:04d}-{index:06d}-{salt:08x}-0123456789abcdef0123456789abcdef"


def plain_memory(nbytes: int) -> memoryview:
    """Memory as an engine's heap has it."""
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Arena:
    """The two halves of a store's memory: where puts come from, full of noise, and gets go to."""

    def __init__(self, memory: memoryview) -> None:
        half = len(memory) // 2
        self.source = memory[:half]
        self.target = memory[half : 2 * half]
        noise = os.urandom(1 << 20)
        for at in range(0, half, len(noise)):
            part = noise[: half - at]
            self.source[at : at + len(part)] = part
        ctypes.memset(address_of(self.target), 0, half)


class Batch:
    """`count` objects of `nbytes`, with everything prepared that an engine has at hand too."""

    def __init__(
        self, arena: Arena, keys: list[str], nbytes: int, *, reading: bool, place: int = 0
    ) -> None:
        """`place`: batches of different places lie apart, for threads."""
        memory = arena.target if reading else arena.source
        memory = memory[place * nbytes * len(keys) :]
        start = address_of(memory) if nbytes else 0
        self.keys = keys
        self.nbytes = nbytes
        self.count = len(keys)
        self.whole = memory[: nbytes * self.count]
        self.views = [memory[i * nbytes : (i + 1) * nbytes] for i in range(self.count)]
        self.addresses = [start + i * nbytes for i in range(self.count)]
        self.sizes = [nbytes] * self.count


class Loop:
    def __init__(self, store: Any, arena: Arena) -> None:
        self._store = store
        self._arena = arena
        self._lock = threading.Lock()
        self._salt = 0
        self._turn = 0
        self._checked: set[str] = set()

    def _batch(
        self, command: dict, number: int, *, salt: int = 0, reading: bool = False, place: int = 0
    ) -> Batch:
        fields = {"tag": command["tag"], "owner": command.get("owner", 0), "set": number}
        keys = [KEY.format(**fields, index=i, salt=salt) for i in range(command["count"])]
        nbytes = 0 if command.get("verb") == "exists" else command["nbytes"]
        return Batch(self._arena, keys, nbytes, reading=reading, place=place)

    def fill(self, command: dict) -> dict:
        for number in range(command["sets"]):
            self._store.put(self._batch(command, number))
        return {}

    def drop(self, command: dict) -> dict:
        for number in range(command["sets"]):
            self._store.remove(self._batch(command, number))
        return {}

    def run(self, command: dict) -> dict:
        count = command.get("threads", 1)
        if count == 1:
            return {"ns": self._run(command, 0)}
        found: list[list[int]] = []
        threads = [
            threading.Thread(target=lambda place=i: found.append(self._run(command, place)))
            for i in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(found) != count:
            raise RuntimeError("a thread failed; the log says why")
        return {"ns": [each for one in found for each in one]}

    def _run(self, command: dict, place: int) -> list[int]:
        verb = command["verb"]
        return self._put(command, place) if verb == "put" else self._read(verb, command, place)

    def _put(self, command: dict, place: int) -> list[int]:
        """Every put is of new keys; they are removed before the next, outside the time."""
        ns = []
        for _ in range(command["repeat"]):
            with self._lock:
                self._salt += 1
                salt = self._salt
            batch = self._batch(command, 0, salt=salt, place=place)
            start = time.perf_counter_ns()
            self._store.put(batch)
            ns.append(time.perf_counter_ns() - start)
            self._store.remove(batch)
        return ns

    def _read(self, verb: str, command: dict, place: int) -> list[int]:
        sets = range(command["sets"])
        batches = [self._batch(command, s, reading=True, place=place) for s in sets]
        operation = getattr(self._store, verb)
        if verb == "get" and command["tag"] not in self._checked:
            self._check(batches)
            self._checked.add(command["tag"])
        ns = []
        for _ in range(command["repeat"]):
            batch = batches[self._turn % len(batches)]
            self._turn += 1
            start = time.perf_counter_ns()
            operation(batch)
            ns.append(time.perf_counter_ns() - start)
        return ns

    def _check(self, batches: list[Batch]) -> None:
        for batch in batches:
            ctypes.memset(batch.addresses[0], 0, len(batch.whole))
            self._store.get(batch)
            if batch.whole != self._arena.source[: len(batch.whole)]:
                raise RuntimeError("a get brought other bytes than were put")


def main() -> None:
    module, settings, nbytes = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints goes to the log
    store = importlib.import_module(f"benchmarks.{module}").open_store(settings, 2 * nbytes)
    loop = Loop(store, Arena(store.memory))
    print(json.dumps({"ready": True}), file=out)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "quit":
            break
        try:
            reply = getattr(loop, command["do"])(command)
        except Exception as error:  # the runner reports it and goes on with the others
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=out)
    store.close()


if __name__ == "__main__":
    main()
