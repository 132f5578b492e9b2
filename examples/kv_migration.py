"""A prefill process writes its KV cache into a decode process, layer by layer.

    python examples/kv_migration.py decode                      prints its address, then waits
    python examples/kv_migration.py prefill ADDRESS [--pause N] writes what the decoder lacks

Each layer is written one-sided into the decoder's memory; the notification that follows finds the
layer's bytes in place, so that decoding of early layers can begin while later ones travel. The
prefill process may be killed at any time: one that starts again asks which layers are there and
goes on with the next. `--pause N` stops after N layers until a line comes on standard input.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Iterator

import numpy as np

from mooncake_py.transfer import (
    FLAG_CRC,
    EngineOptions,
    Memory,
    Message,
    TransferEngine,
    make_slices,
)

LAYERS = 80
LAYER_BYTES = 1 << 20
OFFER, LAYER_IS_THERE = 1, 2  # message kinds
CALL_MS = 10_000


def kv_of(layer: int) -> np.ndarray:
    """Stands for what a model computes: bytes that differ from layer to layer."""
    return np.random.default_rng(layer).integers(0, 256, LAYER_BYTES, dtype=np.uint8)


class Decoder:
    """Offers its memory, and collects layers until all are there."""

    def __init__(self) -> None:
        self.engine = TransferEngine(EngineOptions(listen="127.0.0.1:0"))
        self.memory = Memory(LAYERS * LAYER_BYTES, "kv cache")
        self.region = self.engine.register(self.memory, access="read_write")
        self.layers: set[int] = set()
        self.complete = threading.Event()
        self.engine.on_message(self.handle)

    def handle(self, message: Message) -> None:
        if message.kind == OFFER:
            offer = {"region": self.region.id, "have": sorted(self.layers)}
            message.reply(json.dumps(offer).encode())
        elif message.kind == LAYER_IS_THERE:
            self.layers.add(int.from_bytes(message.payload, "little"))
            if len(self.layers) == LAYERS:
                self.complete.set()

    def wrong_layers(self) -> Iterator[int]:
        cache = np.frombuffer(self.memory.view(), np.uint8)[: LAYERS * LAYER_BYTES]
        for layer, bytes_there in enumerate(cache.reshape(LAYERS, LAYER_BYTES)):
            if not np.array_equal(bytes_there, kv_of(layer)):
                yield layer


def decode() -> int:
    decoder = Decoder()
    print(decoder.engine.address, flush=True)
    decoder.complete.wait()
    wrong = list(decoder.wrong_layers())
    print(f"{LAYERS} layers are there, {len(wrong)} of them wrong", flush=True)
    decoder.engine.close()
    return 1 if wrong else 0


def prefill(address: str, pause_after: int) -> int:
    with TransferEngine() as engine:
        decoder = engine.open(address, timeout_ms=CALL_MS)
        offer = json.loads(decoder.request(OFFER, b"", timeout_ms=CALL_MS))
        missing = [layer for layer in range(LAYERS) if layer not in offer["have"]]
        print(f"{decoder.transport}: {len(missing)} layers are missing", flush=True)
        for count, layer in enumerate(missing, 1):
            cache = kv_of(layer)
            slices = make_slices(1)
            slices["region"] = offer["region"]
            slices["remote_offset"] = layer * LAYER_BYTES
            slices["local"], slices["length"] = cache.ctypes.data, cache.size
            slices["flags"] = FLAG_CRC
            engine.write(decoder, slices, timeout_ms=CALL_MS)
            decoder.send(LAYER_IS_THERE, layer.to_bytes(4, "little"), timeout_ms=CALL_MS)
            if count == pause_after:
                print(f"paused after {count} layers", flush=True)
                sys.stdin.readline()
        print(f"wrote {len(missing)} layers", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    roles = parser.add_subparsers(dest="role", required=True)
    roles.add_parser("decode")
    writer = roles.add_parser("prefill")
    writer.add_argument("address")
    writer.add_argument("--pause", type=int, default=0, metavar="N")
    given = parser.parse_args()
    return decode() if given.role == "decode" else prefill(given.address, given.pause)


if __name__ == "__main__":
    sys.exit(main())
