"""The far side of the transport battery: an engine that does what it is told by messages.

Runs in a thread of the test or, as a program, in a process of its own:
    python transport_far.py '{"listen": "127.0.0.1:0", "transports": ["tcp"]}'
prints its address, and ends when told to or when its standard input closes.
"""

from __future__ import annotations

import json
import mmap
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from mooncake_py._native.memory import address_of, crc32c
from mooncake_py.errors import MooncakeError
from mooncake_py.transfer import EngineOptions, Memory, Message, Rdma, TransferEngine, make_slices

ECHO, COMMAND, NOTE, SILENCE = 1, 2, 3, 4
RECEIVE_MS = 60_000


def pattern(nbytes: int, seed: int) -> np.ndarray:
    """Bytes that differ at every offset and for every seed."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def wait_for(condition: Callable[[], object], seconds: float = 10.0) -> None:
    end, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        pause.wait(0.001)


class Far:
    """Serves until told to stop. `notes` are the one-way messages it got, in order."""

    def __init__(self, options: EngineOptions) -> None:
        self.engine = TransferEngine(options)
        self.notes: list[bytes] = []
        self.memory: dict[int, Any] = {}
        self.regions: dict[int, Any] = {}
        self.serving = True
        self.batch: Any = None
        self.writer: Any = None

    def serve(self) -> None:
        while self.serving:
            message = self.engine.inbox.receive(RECEIVE_MS)
            if message is None:
                return
            self.handle(message)
        self.engine.close()

    def handle(self, message: Message) -> None:
        if message.kind == NOTE:
            self.notes.append(message.payload)
        elif message.kind == ECHO:
            self.answer(message, message.payload)
        elif message.kind == COMMAND:
            command = json.loads(message.payload)
            try:
                done = getattr(self, "do_" + command.pop("do"))(message, **command)
                if message.correlation:
                    self.answer(message, json.dumps({"done": done}).encode())
            except MooncakeError as error:
                failed = {"failed": type(error).__name__, "why": str(error)}
                self.answer(message, json.dumps(failed).encode())

    def answer(self, message: Message, payload: bytes) -> None:
        try:
            message.reply(payload)
        except MooncakeError:
            if self.serving:  # the caller is gone; that is its affair
                return

    def do_register(
        self, _: Message, kind: str, sizes: list[int], seed: int, access: str
    ) -> list[int]:
        parts = []
        for i, nbytes in enumerate(sizes):
            memory: Any = Memory(nbytes) if kind == "memfd" else np.zeros(nbytes, np.uint8)
            view = np.frombuffer(memory.view(), np.uint8) if kind == "memfd" else memory
            view[:nbytes] = pattern(nbytes, seed + i)
            parts.append((memory, view[:nbytes]))
        region = self.engine.register([memory for memory, _ in parts], access=access)
        self.regions[region.id] = region
        self.memory[region.id] = parts
        return [region.id, region.nbytes]

    def do_register_raw(self, _: Message, nbytes: int) -> list[int]:
        """Memory that nobody holds for the engine: (region, address)."""
        raw = mmap.mmap(-1, nbytes)
        raw[:] = pattern(nbytes, 7).tobytes()
        address = address_of(raw)[0]
        region = self.engine.register((address, nbytes), access="read_write")
        self.regions[region.id], self.memory[region.id] = region, raw
        return [region.id, address]

    def do_unmap(self, _: Message, region: int) -> None:
        self.memory[region].close()

    def do_stop_taking(self, message: Message, region: int, nbytes: int) -> int:
        """Take no message until something was written to the first byte of `region`; meanwhile
        ask the sender for an answer, and read from it."""
        (_, view) = self.memory[region][0]
        crc = self.do_read_back(message, region=nbytes >> 32, nbytes=nbytes & 0xFFFFFFFF)
        wait_for(lambda: view[0] == 0xFF)
        return crc

    def do_deregister(self, _: Message, region: int) -> None:
        self.regions.pop(region).close()

    def do_crc(self, _: Message, region: int) -> int:
        crc = 0
        for _, view in self.memory[region]:
            crc = crc32c(view, crc)
        return crc

    def do_notes(self, _: Message) -> list[str]:
        return [note.decode() for note in self.notes]

    def do_read_back(self, message: Message, region: int, nbytes: int) -> int:
        """Read from whoever sent this, over the connection it came by; the crc of it."""
        target = np.zeros(nbytes, np.uint8)
        slices = make_slices(1)
        slices["region"], slices["length"], slices["local"] = region, nbytes, address_of(target)[0]
        self.engine.read(self.engine.peer(message.peer_id), slices, timeout_ms=5_000)
        return crc32c(target)

    def do_read_many(self, message: Message, region: int, nbytes: int, times: int) -> int:
        for _ in range(times):
            crc = self.do_read_back(message, region, nbytes)
        return crc

    def do_open_anew(self, _: Message, address: str) -> str:
        """The transport by which a fresh engine of this process gets to `address`."""
        transports = tuple(self.engine.options.transports)
        with TransferEngine(EngineOptions(transports=transports)) as fresh:
            return fresh.open(address, timeout_ms=5_000).transport

    def do_write_to_sender(self, message: Message, region: int, source: int, nbytes: int) -> None:
        """Write from a region of ours into one of whoever sent this, in the background."""
        slices = make_slices(1)
        slices["op"], slices["region"], slices["length"] = 2, region, nbytes
        slices["local"] = address_of(self.memory[source][0][1])[0]
        self.batch = self.engine.submit(self.engine.peer(message.peer_id), slices, timeout_ms=5_000)

    def do_write_for_ever(self, message: Message, region: int, source: int, nbytes: int) -> None:
        """Write from a region of ours into one of whoever sent this, until that fails."""
        slices = make_slices(1)
        slices["region"], slices["length"] = region, nbytes
        slices["local"] = address_of(self.memory[source][0][1])[0]
        peer = self.engine.peer(message.peer_id)

        def write() -> None:
            with suppress(MooncakeError):
                while True:
                    self.engine.write(peer, slices, timeout_ms=5_000)

        self.writer = threading.Thread(target=write)
        self.writer.start()

    def do_writer_ended(self, _: Message) -> bool:
        self.writer.join(5)
        return not self.writer.is_alive()

    def do_describe(self, _: Message) -> dict[str, Any]:
        return self.engine.describe()

    def do_stop(self, _: Message) -> None:
        self.serving = False


def options_of(text: str) -> EngineOptions:
    given = json.loads(text)
    given["transports"] = tuple(given["transports"])
    rdma = given.pop("rdma", {})
    given["rdma"] = Rdma(**{**rdma, "devices": tuple(rdma.get("devices", ()))})
    return EngineOptions(**given)


def main() -> None:
    far = Far(options_of(sys.argv[1]))

    def end_with_parent() -> None:
        sys.stdin.read()
        far.serving = False
        far.engine.inbox.wake()

    threading.Thread(target=end_with_parent, daemon=True).start()
    sys.stdout.write(far.engine.address + "\n")
    sys.stdout.flush()
    far.serve()


if __name__ == "__main__":
    main()
