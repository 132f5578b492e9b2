"""`TransferEngine`: registered memory, peers, transfers and messages of one process.

Every method is thread-safe and blocking ones release the GIL. Everything that may wait takes
`timeout_ms` and ends in time, whatever the peer does. An engine that was opened before `fork()`
raises UsageError in the child.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mooncake_py._native import ffi, lib
from mooncake_py._native.check import check, failure, last_error
from mooncake_py._native.handle import Handle
from mooncake_py._native.held import NOT_NOW, number_of, transfer_now
from mooncake_py.errors import OutOfSpace, UsageError
from mooncake_py.transfer.batch import Batch
from mooncake_py.transfer.directory import Directory, resolve
from mooncake_py.transfer.messages import Inbox, Message
from mooncake_py.transfer.options import EngineOptions, native_options
from mooncake_py.transfer.peer import Peer
from mooncake_py.transfer.region import Region
from mooncake_py.transfer.slices import OP_READ, OP_WRITE, Slices, check_slices, slice_array

if TYPE_CHECKING:
    from mooncake_py.transfer.region import Registrable

ADDRESS_BYTES = 512
log = logging.getLogger(__name__)


class TransferEngine(Handle):
    """Opens with `options`; `directory` knows peers by name. Raises UsageError when it cannot
    listen where it should. `inbox` has the messages that no handler takes."""

    def __init__(
        self, options: EngineOptions | None = None, directory: Directory | None = None
    ) -> None:
        super().__init__(None)
        self.options = options or EngineOptions()
        native, keep = native_options(self.options)
        out = ffi.new("mc_engine **")
        status = lib.mc_engine_open(native, out)
        if status != 0:
            raise self._not_opened(status)
        del keep
        self.native: Any = ffi.gc(out[0], lib.mc_engine_close)
        self._number = number_of(self.native)
        self._end_with(lib.mc_engine_shutdown, self.native)
        self._registered: set[Region] = set()  # memory stays registered until told otherwise
        self._directory = directory
        self.inbox = Inbox(self)
        if "rdma" in self.options.transports:
            self._tell_about_rdma()

    def _not_opened(self, status: int) -> Exception:
        words = last_error()
        if status == lib.MC_E_OUT_OF_SPACE:  # not of the store, but of this process
            return OutOfSpace(
                f"open engine: {words}",
                remedy="raise the limit of open files (ulimit -n), or close what is not needed",
            )
        if words.startswith("no RDMA here"):
            return UsageError(
                f"open engine: {words}",
                remedy="make `ibv_devices` (of the package ibverbs-utils) list a device whose port"
                ' is active, or name "tcp" among the transports, too, which is used until then',
                transports=self.options.transports,
            )
        return failure(status, "open engine", listen=self.options.listen)

    def _tell_about_rdma(self) -> None:
        """No silent choice: the ports in use, or why it is tcp instead, are printed."""
        rdma = self.describe()["rdma"]
        if rdma["state"] == "on":
            log.info("rdma: %s", rdma["reason"])
        else:
            log.warning("rdma is not used, tcp is: %s", rdma["reason"])

    @property
    def address(self) -> str:
        """ "host:port" that peers should open; "" when it does not listen."""
        text = ffi.new("char[]", ADDRESS_BYTES)
        check(lib.mc_engine_address(self.native, text, ADDRESS_BYTES), "address")
        return bytes(ffi.string(text)).decode()

    def register(
        self, buffer: Registrable | list[Registrable], *, access: str = "read", fd: int = -1
    ) -> Region:
        """Offer memory to peers; `access` is "read" or "read_write".

        A buffer is held until the region is closed. A raw (address, bytes) pair is the caller's:
        it must stay mapped that long. If it does not, slices of it fail with AccessRefused.
        fd: of a memfd whose first byte is the buffer's; peers on this host that may not look into
        this process read through it.

        It stays registered until the region or the engine is closed, also when nobody holds the
        region. A list makes one region, its pieces one after the other. Raises UsageError for
        memory that is read-only, not contiguous, empty, not of the host (the words say what this
        machine lacks: `device_memory.py`), or overlaps another region. Only lists
        that are all for reading, values to be fetched from wherever they lie, may overlap.
        """
        region = Region(self, buffer, access, fd)
        self._registered.add(region)
        return region

    def _forget(self, region: Region) -> None:
        """A region of this engine was closed. Called by the region."""
        self._registered.discard(region)

    def open(self, address: str, *, timeout_ms: int) -> Peer:
        """Connect, or find the live connection, to the engine at "host:port", or of that name.

        Raises PeerUnreachable, TransferTimeout, VersionMismatch, UsageError (a bad address).
        """
        name, address = address, resolve(address, self._directory)
        out = ffi.new("uint64_t *")
        status = lib.mc_peer_open(self.native, address.encode(), timeout_ms, out)
        if status != 0:
            raise failure(status, "open", peer=name)
        return Peer(self, int(out[0]), name, opened=True)

    def peer(self, peer_id: int) -> Peer:
        """The sender of a received message. Closing it does not cut the connection."""
        return Peer(self, peer_id, f"peer {peer_id}", opened=False)

    def read(self, peer: Peer, slices: Slices, *, timeout_ms: int) -> None:
        """Remote to local. Sets `op`; raises the first failing slice's error, `status` has each.

        After it returned or raised, nothing is written into the local memory of the slices.
        """
        slices["op"] = OP_READ
        self._transfer(peer, slices, timeout_ms)

    def write(self, peer: Peer, slices: Slices, *, timeout_ms: int) -> None:
        """Local to remote. Sets `op`; raises the first failing slice's error."""
        slices["op"] = OP_WRITE
        self._transfer(peer, slices, timeout_ms)

    def _transfer(self, peer: Peer, slices: Slices, timeout_ms: int) -> None:
        check_slices(slices)
        status = transfer_now(self._number, peer.id, slices)
        if status == NOT_NOW:
            rows = slice_array(slices)
            status = lib.mc_transfer(self.native, peer.id, rows, len(slices), timeout_ms)
        if status != 0:
            raise failure(status, "transfer", peer=peer.address, slices=len(slices))

    def submit(self, peer: Peer, slices: Slices, *, timeout_ms: int) -> Batch:
        """Start a batch whose `op` columns are set; its deadline is timeout_ms from now."""
        rows = slice_array(slices)
        out = ffi.new("mc_batch **")
        status = lib.mc_batch_submit(self.native, peer.id, rows, len(slices), timeout_ms, out)
        check(status, "submit", peer=peer.address, slices=len(slices))
        return Batch(self, out[0], slices, rows)

    def on_message(self, handler: Callable[[Message], object], *, threads: int = 1) -> None:
        """Call `handler` with each received message, in `threads` threads until the engine closes.

        With one thread messages are handled in the order of their arrival, and a message that was
        sent after a batch had completed finds that batch's data in place. An exception is logged
        and the next message handled. `inbox.receive` is the other way to get them.
        """
        if not 1 <= threads <= 256:
            raise UsageError("threads is from 1 to 256", got=threads)
        self.inbox._serve(handler, threads)

    def describe(self) -> dict[str, Any]:
        """Address, peers with transport and reason, regions, queues, counters."""
        needed = ffi.new("uint64_t *")
        check(lib.mc_engine_describe(self.native, ffi.NULL, 0, needed), "describe")
        while True:
            capacity = int(needed[0]) + 4096  # it may have grown meanwhile
            text = ffi.new("char[]", capacity)
            check(lib.mc_engine_describe(self.native, text, capacity, needed), "describe")
            if needed[0] <= capacity:
                found: dict[str, Any] = json.loads(bytes(ffi.string(text)))
                return found

    def _end(self) -> None:
        self._finalizer()
        self.inbox._join()
