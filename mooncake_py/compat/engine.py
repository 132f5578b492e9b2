"""`mooncake.engine`: upstream's transfer engine class over `transfer.TransferEngine`.

Upstream names remote memory by its address in the peer's process. Our engine names it by region and
offset, so each side tells the other, when asked, what it has registered (message REGIONS), and an
address is looked up there. A peer is asked again when an address is not found or a region is gone.

Blocking calls end `MC_TRANSFER_TIMEOUT` seconds (30, at least 5) after the last GiB that moved.
Their result, and an asynchronous batch's status, is that of all of its slices.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from mooncake_py import errors
from mooncake_py.compat.guard import guarded, nothing
from mooncake_py.compat.lifecycle import host_and_port, transports_of
from mooncake_py.compat.peers import (
    ITS_OWN_MS,
    ROW,
    Remote,
    TransferNotify,
    TransferOpcode,
    check_local,
    notify_of,
    parts_of,
    rows_of,
    time_for,
)
from mooncake_py.config import join_address, split_address, upstream_variable
from mooncake_py.errors import MooncakeError, UsageError
from mooncake_py.store.raw_memory import is_mapped, raw_view
from mooncake_py.transfer import (
    SLICE,
    Batch,
    EngineOptions,
    Memory,
    Message,
    Region,
)
from mooncake_py.transfer import TransferEngine as Engine
from mooncake_py.transfer.slices import OP_READ, OP_WRITE

log = logging.getLogger(__name__)

OK, INVALID_ARGUMENT, ADDRESS_NOT_REGISTERED, ADDRESS_OVERLAPPED = 0, -1, -3, -7
RUNNING, DONE, FAILED, TIMED_OUT = 0, 1, -1, -2

REGIONS = 0x4D43  # message kind: what memory do you offer?
NOTIFY = 0x4D44  # message kind: a TransferNotify as JSON; answered once it can be fetched
NOTIFIES_MAX = 65_536  # that nobody fetched; older ones are dropped
_CONNECT_MS = 5_000
_PROBE_MS = 2_000
BATCHES_MAX = 65_536  # asynchronous ones that nobody asked about


_ONE, _NUMBER = nothing(INVALID_ARGUMENT), nothing(0)


@guarded(
    {
        **dict.fromkeys(
            (
                "initialize", "initialize_ext", "register_memory", "unregister_memory",
                "batch_register_memory", "batch_unregister_memory", "free_managed_buffer",
                "write_bytes_to_buffer", "transfer_sync_write", "transfer_sync_read",
                "batch_transfer_sync_write", "batch_transfer_sync_read", "transfer_sync",
                "batch_transfer_sync", "transfer_check_status", "get_batch_transfer_status",
                "send_probe",
            ),
            _ONE,
        ),
        **dict.fromkeys(
            (
                "allocate_managed_buffer", "get_first_buffer_address", "transfer_submit_write",
                "batch_transfer_async_write", "batch_transfer_async_read", "batch_transfer_async",
            ),
            _NUMBER,
        ),
        "read_bytes_from_buffer": nothing(b""),
    }
)  # fmt: skip
class TransferEngine:
    """Thread-safe after `initialize`."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._lock = threading.Lock()
        self._regions: dict[int, Region] = {}
        self._remotes: dict[str, Remote] = {}
        self._batches: dict[int, Batch] = {}
        self._ids = itertools.count(1)
        self._managed: dict[int, Memory] = {}
        self._has_rdma = False
        self._notifies: deque[TransferNotify] = deque(maxlen=NOTIFIES_MAX)
        seconds = upstream_variable("MC_TRANSFER_TIMEOUT", "30")
        self._timeout_ms = 1_000 * max(5, int(seconds) if seconds.isdigit() else 30)

    # --- lifecycle ---

    def initialize(
        self,
        local_hostname: str,
        metadata_server: str,
        protocol: str = "tcp",
        device_name: str = "",
        metadata_type: str = "",
    ) -> int:
        """Listen on this host, on the port given or on any. The metadata server and the devices
        are not needed: peers ask each other. Once: memory and peers are of that engine."""
        if self._engine is not None:
            log.error("initialize failed: this engine listens at %s already", self._engine.address)
            return INVALID_ARGUMENT
        try:
            host, port = host_and_port(local_hostname)
            options = EngineOptions(
                listen=join_address(host, port), transports=transports_of(protocol, device_name)
            )
            engine = Engine(options)
        except MooncakeError as error:
            log.error("initialize failed: %s", error)
            return INVALID_ARGUMENT
        engine.on_message(self._answer)
        self._has_rdma = engine.describe()["rdma"]["state"] == "on"
        self._engine = engine
        return OK

    initialize_ext = initialize

    def get_rpc_port(self) -> int:
        """The port that peers reach this one by; with the host before it, it is the session."""
        return split_address(self._engine.address)[1] if self._engine is not None else 0

    def get_engine(self) -> object:
        """For the store's `setup`, which has an engine of its own and does not look into it."""
        return self

    def get_engine_ptr(self) -> int:
        """Upstream's address of its C++ object. There is none here."""
        return 0

    def get_local_topology(self, device_name: str | None = None) -> str:
        """JSON: what this engine found on this machine."""
        return json.dumps(self._engine.describe() if self._engine is not None else {})

    def _answer(self, message: Message) -> None:
        if message.kind == NOTIFY:
            note = notify_of(message.payload)
            if note is not None:  # else its sender's wait ends
                self._notifies.append(note)
                message.reply(b"")
        elif message.kind == REGIONS:
            with self._lock:
                found = [(each.address, each.nbytes, each.id) for each in self._regions.values()]
            message.reply(rows_of(found))

    # --- memory ---

    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        engine = self._engine
        if engine is None or capacity <= 0:
            return INVALID_ARGUMENT
        if not is_mapped(buffer_addr, capacity) and not self._has_rdma:
            return INVALID_ARGUMENT  # a GPU's memory is no memory here, and RDMA may still reach it
        with self._lock:
            for address, region in self._regions.items():
                if address < buffer_addr + capacity and buffer_addr < address + region.nbytes:
                    return ADDRESS_OVERLAPPED
            try:
                managed = self._managed.get(buffer_addr)
                given: Any = (buffer_addr, capacity) if managed is None else managed
                self._regions[buffer_addr] = engine.register(given, access="read_write")
            except MooncakeError as error:
                log.warning("%s", error)
                wrong = isinstance(error, UsageError)
                return ADDRESS_OVERLAPPED if wrong else INVALID_ARGUMENT
        return OK

    def unregister_memory(self, buffer_addr: int) -> int:
        with self._lock:
            region = self._regions.pop(buffer_addr, None)
        if region is None:
            return ADDRESS_NOT_REGISTERED
        region.close()
        return OK

    def batch_register_memory(
        self, buffer_addrs: Sequence[int], capacities: Sequence[int], location: str = "*"
    ) -> int:
        if len(buffer_addrs) != len(capacities):
            return INVALID_ARGUMENT
        found = [
            self.register_memory(address, capacity)
            for address, capacity in zip(buffer_addrs, capacities, strict=True)
        ]
        return next((code for code in found if code), OK)

    def batch_unregister_memory(self, buffer_addrs: Sequence[int]) -> int:
        found = [self.unregister_memory(address) for address in buffer_addrs]
        return next((code for code in found if code), OK)

    def allocate_managed_buffer(self, length: int) -> int:
        """Registered memory; its address, or 0."""
        try:
            memory = Memory(length, name="mooncake-engine")
        except MooncakeError as error:
            log.warning("%s", error)
            return 0
        self._managed[memory.base] = memory
        if self.register_memory(memory.base, memory.nbytes) == OK:
            return memory.base
        del self._managed[memory.base]
        memory.close()
        return 0

    def free_managed_buffer(self, buffer_addr: int, length: int = 0) -> int:
        memory = self._managed.pop(buffer_addr, None)
        if memory is None:
            return ADDRESS_NOT_REGISTERED
        self.unregister_memory(buffer_addr)
        memory.close()
        return OK

    def write_bytes_to_buffer(self, dest_address: int, data: bytes, length: int) -> int:
        if not is_mapped(dest_address, length) or length > len(data):
            return INVALID_ARGUMENT
        raw_view(dest_address, length)[:] = data[:length]
        return OK

    def read_bytes_from_buffer(self, source_address: int, length: int) -> bytes:
        """Empty for what is no memory of this process."""
        if not is_mapped(source_address, length):
            return b""
        return bytes(raw_view(source_address, length))

    def get_first_buffer_address(self, segment_name: str) -> int:
        """Lowest address that the peer offers, or 0."""
        try:
            rows = self._remote(segment_name, again=True).rows
        except MooncakeError as error:
            log.warning("%s", error)
            return 0
        return rows[0][0] if rows else 0

    # --- transfers that block ---

    def transfer_sync_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int
    ) -> int:
        return self._sync(target_hostname, [buffer], [peer_buffer_address], [length], OP_WRITE)

    def transfer_sync_read(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int
    ) -> int:
        return self._sync(target_hostname, [buffer], [peer_buffer_address], [length], OP_READ)

    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        """0 once every byte is in the peer's memory, -1 otherwise."""
        return self._sync(target_hostname, buffers, peer_buffer_addresses, lengths, OP_WRITE)

    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        return self._sync(target_hostname, buffers, peer_buffer_addresses, lengths, OP_READ)

    def transfer_sync(  # noqa: PLR0913, PLR0917 - upstream's signature
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: int,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        one = ([buffer], [peer_buffer_address], [length])
        return self.batch_transfer_sync(target_hostname, *one, opcode, notify, transport_hint)

    def batch_transfer_sync(  # noqa: PLR0913, PLR0917 - upstream's signature
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: int,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """notify: for the peer's `get_notifies`, once every byte has moved. -1 also when it could
        not be told."""
        op = OP_WRITE if int(opcode) == TransferOpcode.Write else OP_READ
        code = self._sync(target_hostname, buffers, peer_buffer_addresses, lengths, op)
        if code or notify is None:
            return code
        try:
            payload = json.dumps([notify.name, notify.msg]).encode()
            self._remote(target_hostname).peer.request(NOTIFY, payload, timeout_ms=_CONNECT_MS)
        except MooncakeError as error:
            log.warning("notify of %s: %s", target_hostname, error)
            self._forget(target_hostname, error)
            return FAILED
        return OK

    def get_notifies(self) -> list[TransferNotify]:
        """What peers have notified since the last call, in order."""
        return [self._notifies.popleft() for _ in range(len(self._notifies))]

    def _sync(
        self,
        target: str,
        local: Sequence[int],
        remote: Sequence[int],
        lengths: Sequence[int],
        op: int,
    ) -> int:
        if not len(local) == len(remote) == len(lengths):
            return INVALID_ARGUMENT
        for part in parts_of(local, remote, lengths):
            if code := self._sync_part(target, part, op):
                return code
        return OK

    def _sync_part(self, target: str, part: tuple[Any, Any, Any], op: int) -> int:
        for again in (False, True):
            try:
                batch = self._submit(target, part, op, again)
                with batch:
                    batch.wait(self._timeout_ms + 1_000)
                return OK
            except errors.AccessRefused as error:
                if again:
                    log.warning("transfer with %s: %s", target, error)
            except MooncakeError as error:
                log.warning("transfer with %s: %s", target, error)
                self._forget(target, error)
                return FAILED
        return FAILED

    def _submit(self, target: str, what: tuple[Any, Any, Any], op: int, again: bool) -> Batch:
        engine = self._live()
        local, remote, lengths = what
        with self._lock:
            known = [(each.address, each.nbytes) for each in self._regions.values()]
        check_local(known, local, lengths)
        there = self._remote(target, again)
        places = [
            there.place(int(address), int(length))
            for address, length in zip(remote, lengths, strict=True)
        ]
        slices = np.zeros(len(local), dtype=SLICE)
        slices["op"], slices["local"], slices["length"] = op, local, lengths
        slices["region"] = [region for region, _ in places]
        slices["remote_offset"] = [offset for _, offset in places]
        timeout_ms = time_for(lengths, self._timeout_ms)
        return engine.submit(there.peer, slices, timeout_ms=timeout_ms)

    # --- transfers that do not ---

    def batch_transfer_async_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        """A number for `transfer_check_status`; 0 when it could not be begun."""
        return self._begin(target_hostname, (buffers, peer_buffer_addresses, lengths), OP_WRITE)

    def batch_transfer_async_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        return self._begin(target_hostname, (buffers, peer_buffer_addresses, lengths), OP_READ)

    def batch_transfer_async(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: int,
        transport_hint: str = "",
    ) -> int:
        op = OP_WRITE if int(opcode) == TransferOpcode.Write else OP_READ
        return self._begin(target_hostname, (buffers, peer_buffer_addresses, lengths), op)

    def transfer_submit_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int
    ) -> int:
        return self._begin(target_hostname, ([buffer], [peer_buffer_address], [length]), OP_WRITE)

    def _begin(self, target: str, what: tuple[Any, Any, Any], op: int) -> int:
        if not len(what[0]) == len(what[1]) == len(what[2]) or len(what[0]) == 0:
            return 0
        for again in (False, True):
            try:
                batch = self._submit(target, what, op, again)
            except errors.AccessRefused as error:
                log.debug("asked again: %s", error)
                continue
            except MooncakeError as error:
                log.warning("transfer with %s: %s", target, error)
                self._forget(target, error)
                return 0
            number = next(self._ids)
            with self._lock:
                while len(self._batches) >= BATCHES_MAX:
                    self._batches.pop(next(iter(self._batches))).close()
                self._batches[number] = batch
            return number
        return 0

    def transfer_check_status(self, batch_id: int) -> int:
        """0 while any part of it is on its way, then once 1 (all of it is there), -1 or -2."""
        batch = self._batches.get(batch_id)
        if batch is None:
            return FAILED
        if not batch.done():
            return RUNNING
        with self._lock:
            self._batches.pop(batch_id, None)
        return self._outcome(batch, 0)

    def get_batch_transfer_status(self, batch_ids: Sequence[int]) -> int:
        """Wait for all of them: 0, or -1 when one has failed."""
        with self._lock:
            batches = [self._batches.pop(each, None) for each in batch_ids]
        found = [FAILED if batch is None else self._outcome(batch, ITS_OWN_MS) for batch in batches]
        return OK if all(status == DONE for status in found) else FAILED

    @staticmethod
    def _outcome(batch: Batch, wait_ms: int) -> int:
        with batch:
            try:
                batch.wait(wait_ms)
            except errors.TransferTimeout:
                return TIMED_OUT
            except MooncakeError as error:
                log.warning("transfer: %s", error)
                return FAILED
        return DONE

    # --- peers ---

    def send_probe(self, peer_server_name: str, *_: Any) -> int:
        """0: the peer is alive."""
        try:
            remote = self._remote(peer_server_name)
            remote.peer.request(REGIONS, b"?", timeout_ms=_PROBE_MS)
        except MooncakeError as error:
            self._forget(peer_server_name, error)
            return FAILED
        return OK

    def _live(self) -> Engine:
        if self._engine is None:
            raise UsageError("initialize comes first")
        return self._engine

    def _remote(self, target: str, again: bool = False) -> Remote:
        """The peer of this session. again: ask it once more what it offers."""
        known = self._remotes.get(target)
        if known is not None and not again:
            return known
        peer = (
            known.peer if known is not None else self._live().open(target, timeout_ms=_CONNECT_MS)
        )
        answer = peer.request(REGIONS, b"?", timeout_ms=_CONNECT_MS)
        rows = np.frombuffer(answer, dtype=ROW)
        columns = [rows[name].tolist() for name in ("address", "nbytes", "region")]
        found = self._remotes[target] = Remote(peer, list(zip(*columns, strict=True)))
        return found

    def _forget(self, target: str, error: MooncakeError) -> None:
        if isinstance(error, errors.PeerUnreachable | errors.TransferTimeout):
            self._remotes.pop(target, None)
