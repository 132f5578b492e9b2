"""Regions: ranges of local memory that peers may read, or read and write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mooncake_py._native import ffi, lib
from mooncake_py._native.check import check, failure
from mooncake_py._native.handle import Handle
from mooncake_py.errors import UsageError
from mooncake_py.transfer.device_memory import refuse_device_memory
from mooncake_py.transfer.memory import Memory

if TYPE_CHECKING:
    from mooncake_py._native.memory import Buffer
    from mooncake_py.transfer.engine import TransferEngine

    # A Memory, anything with the buffer protocol, or a raw (address, bytes).
    Registrable = Memory | Buffer | tuple[int, int]

ACCESS: dict[str, int] = {
    "read": lib.MC_ACCESS_REMOTE_READ,
    "read_write": lib.MC_ACCESS_REMOTE_READ | lib.MC_ACCESS_REMOTE_WRITE,
}
DEREGISTER_MS = 10_000  # copies that run end by themselves; a peer that does not answer is cut


def _raw(pair: tuple[int, int]) -> tuple[int, int]:
    address, nbytes = pair
    if not (0 < address < 1 << 64 and 0 < nbytes < 1 << 64):
        raise UsageError("raw memory is (address, bytes), both above 0", got=pair)
    return address, nbytes


def _pieces_of(
    engine: TransferEngine, buffers: list[Registrable], writable: bool
) -> tuple[Any, list[Any], int]:
    """(mc_piece array, what to keep alive, memfd or -1) of the buffers."""
    pieces = ffi.new("mc_piece[]", len(buffers))
    keep: list[Any] = []
    fd = -1
    for piece, buffer in zip(pieces, buffers, strict=True):
        if isinstance(buffer, Memory):
            keep.append(buffer._keep())
            piece.address, piece.nbytes = buffer.base, buffer.nbytes
            fd = buffer.fd if len(buffers) == 1 else -1
            continue
        if isinstance(buffer, tuple):
            piece.address, piece.nbytes = _raw(buffer)
            continue
        try:
            data = ffi.from_buffer("uint8_t[]", buffer, require_writable=writable)
        except (BufferError, TypeError, ValueError) as error:
            refuse_device_memory(engine, buffer)
            raise UsageError(f"not usable as registered memory: {error}") from error
        keep.append(data)
        piece.address, piece.nbytes = int(ffi.cast("uintptr_t", data)), len(data)
    return pieces, keep, fd


# Memory that could not be taken back: somebody may still write there, so it is never freed.
_kept: dict[int, list[Any]] = {}


def _deregister(engine: Any, region_id: int, keep: list[Any]) -> int:
    """Other failures than TIMEOUT mean that the engine is gone, or was opened before a fork."""
    status = int(lib.mc_region_deregister(engine, region_id, DEREGISTER_MS))
    if status == lib.MC_E_TIMEOUT:
        _kept[id(keep)] = keep
    else:
        _kept.pop(id(keep), None)
        keep.clear()
    return status


class Region(Handle):
    """Registered memory. Close it, or its engine, to take it back; made by `register`.

    The buffers are held (and a bytearray cannot be resized) until it is closed. After `close`
    returned nothing is written into them and peers are refused. When it raises TransferTimeout, a
    copy has not ended (a peer on this host is held up in the middle of one): the buffers are held
    on, and `close` may be called again.
    """

    def __init__(
        self,
        engine: TransferEngine,
        given: Registrable | list[Registrable],
        access: str,
        fd: int = -1,
    ) -> None:
        if access not in ACCESS:
            raise UsageError("access is 'read' or 'read_write'", got=access)
        buffers = given if isinstance(given, list) else [given]
        pieces, keep, own_fd = _pieces_of(engine, buffers, writable=access == "read_write")
        if fd >= 0 and isinstance(given, list):
            raise UsageError("a descriptor is of one buffer, not of a list")
        flags = ACCESS[access]
        if isinstance(given, list) and access == "read":
            flags |= lib.MC_ACCESS_GATHERED
        if any(isinstance(buffer, tuple) for buffer in buffers):
            flags |= lib.MC_ACCESS_RAW
        out = ffi.new("uint32_t *")
        check(
            lib.mc_region_register(
                engine.native, pieces, len(buffers), flags, own_fd if fd < 0 else fd, out
            ),
            "register",
        )
        super().__init__(engine)
        self._engine = engine
        self.id = int(out[0])
        self.nbytes = sum(int(piece.nbytes) for piece in pieces)
        self.address = int(pieces[0].address) if buffers else 0
        self.access = access
        self._end_with(_deregister, engine.native, self.id, keep)
        self._again = (engine.native, self.id, keep)

    def _end(self) -> None:
        alive = self._finalizer.alive
        status = self._finalizer() if alive else _deregister(*self._again)
        self._engine._forget(self)
        if status == lib.MC_E_TIMEOUT:
            self._closed = False
            raise failure(status, "deregister", region=self.id)
