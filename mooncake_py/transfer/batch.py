"""Batches: slices on their way, submitted and completed together."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from mooncake_py._native import ffi, lib
from mooncake_py._native.check import check
from mooncake_py._native.handle import Handle

if TYPE_CHECKING:
    from mooncake_py.transfer.engine import TransferEngine
    from mooncake_py.transfer.slices import Slices


def _cancel(native: Any, _rows: Any) -> None:
    lib.mc_batch_cancel(native)


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


class Batch(Handle):
    """A submitted batch. Results are in `slices` once it is done. Made by `submit`.

    The local memory of the slices must stay valid until it is done or closed.
    """

    def __init__(self, engine: TransferEngine, native: Any, slices: Slices, keep: Any) -> None:
        super().__init__(engine)
        self.slices = slices
        self._native = ffi.gc(native, lib.mc_batch_close)
        self._end_with(_cancel, self._native, keep)  # rows are written until the batch is over

    def wait(self, timeout_ms: int) -> None:
        """Wait until it is done. Raises the first failing slice's error, or TransferTimeout when
        it is not done yet (it goes on until its own deadline). An interrupt (Ctrl-C) ends the
        wait."""
        check(lib.mc_batch_wait(self._native, timeout_ms), "batch", slices=len(self.slices))

    def done(self) -> bool:
        return bool(lib.mc_batch_done(self._native))

    def cancel(self) -> None:
        """End what has not completed. Afterwards no byte is written into local memory for it."""
        lib.mc_batch_cancel(self._native)

    def fileno(self) -> int:
        """An eventfd that becomes readable once the batch is done, for select and asyncio."""
        return check(lib.mc_batch_fd(self._native), "batch")

    def __await__(self) -> Generator[Any, None, None]:
        """`await batch`: as `wait`, on an asyncio loop. Awaiting may be cancelled or timed out;
        the batch goes on until its own deadline, or until it is cancelled or closed."""
        return self._completion().__await__()

    async def _completion(self) -> None:
        if not self.done():
            loop = asyncio.get_running_loop()
            ready: asyncio.Future[None] = loop.create_future()
            descriptor = self.fileno()
            loop.add_reader(descriptor, _settle, ready)
            try:
                await ready
            finally:
                loop.remove_reader(descriptor)
        self.wait(0)

    def _end(self) -> None:
        self._finalizer()
