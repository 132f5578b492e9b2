"""Peers: engines that this one is connected with, whoever called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake_py._native import ffi, lib
from mooncake_py._native.check import check, failure
from mooncake_py._native.handle import Handle
from mooncake_py.transfer.memory import Mapping
from mooncake_py.transfer.options import TRANSPORT_NAMES

_MESSAGE = ffi.typeof("mc_message *")

if TYPE_CHECKING:
    from mooncake_py._native.memory import Buffer
    from mooncake_py.transfer.engine import TransferEngine


class Peer(Handle):
    """One connected peer. Thread-safe. Every call raises PeerUnreachable once it is gone."""

    def __init__(self, engine: TransferEngine, peer_id: int, address: str, opened: bool) -> None:
        super().__init__(engine)
        self.id = peer_id
        self.address = address
        self._native = engine.native
        self._opened = opened

    def is_of(self, engine: TransferEngine) -> bool:
        """Did this engine open it? `id` means nothing to another one."""
        return self._parent is engine

    @property
    def transport(self) -> str:
        """local, shm, tcp, rdma or fake."""
        return TRANSPORT_NAMES[check(lib.mc_peer_transport(self._native, self.id), "peer")]

    def request(self, kind: int, payload: Buffer, *, timeout_ms: int) -> bytes:
        """Send a message and wait for its reply. Raises TransferTimeout, PeerUnreachable."""
        data = ffi.from_buffer(payload)
        reply = ffi.new(_MESSAGE)
        status = lib.mc_message_request(
            self._native, self.id, kind, data, len(data), timeout_ms, reply
        )
        if status != 0:
            raise failure(status, "request", peer=self.address, kind=kind)
        try:
            payload_back: bytes = ffi.buffer(reply.data, reply.nbytes)[:]
            return payload_back
        finally:
            lib.mc_message_free(reply)

    def send(self, kind: int, payload: Buffer, *, timeout_ms: int) -> None:
        """Send a one-way message, after every earlier one to this peer. Waits for room only."""
        data = ffi.from_buffer(payload)
        status = lib.mc_message_send(self._native, self.id, kind, data, len(data), timeout_ms)
        if status != 0:
            raise failure(status, "send", peer=self.address, kind=kind)

    def map(self, region_id: int, *, timeout_ms: int) -> Mapping:
        """Map the peer's region read-only, populated. AccessRefused: not on this host, or the
        region is no memfd. The mapping outlives peer and engine."""
        base, nbytes = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        status = lib.mc_peer_map(self._native, self.id, region_id, timeout_ms, base, nbytes)
        check(status, "map", peer=self.address, region=region_id)
        return Mapping(int(base[0]), int(nbytes[0]))

    def _end(self) -> None:
        if self._opened:
            lib.mc_peer_close(self._native, self.id)
