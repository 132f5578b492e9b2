"""How works reach the device and how their ends are noticed: by what the port counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from rdma_ports import FAR, NEAR
from transport_far import pattern
from transport_pair import MS, PART, slices_for

from mooncake_py.transfer import EngineOptions, TransferEngine
from mooncake_py.transfer.slices import OP_WRITE

INLINE_BYTES = 64  # every device takes that much; soft-RoCE and cards take more
NBYTES = 4 * PART


class Two:
    """A region there and its like here, both registered, and what our port has counted."""

    def __init__(self, near: TransferEngine, far: TransferEngine) -> None:
        self._near, self._peer = near, near.open(far.address, timeout_ms=MS)
        self.theirs, self.ours = pattern(NBYTES, 7), np.zeros(NBYTES, np.uint8)
        self._region = far.register(self.theirs, access="read_write")
        self._mine = near.register(self.ours)

    def _counted(self) -> dict[str, int]:
        (port,) = self._near.describe()["rdma"]["fabric"]["ports"]
        return {name: value for name, value in port.items() if isinstance(value, int)}

    def move(self, verb: str, nbytes: int, count: int = 1) -> dict[str, int]:
        """Slices of `nbytes` in one batch; by how much each count of the port grew."""
        before = self._counted()
        pieces = [(i * nbytes, nbytes) for i in range(count)]
        slices = slices_for(self._region.id, self.ours, pieces)
        if verb == "read":
            self._near.read(self._peer, slices, timeout_ms=MS)
        else:
            slices["op"] = OP_WRITE
            self._near.write(self._peer, slices, timeout_ms=MS)
        assert np.array_equal(self.ours[: nbytes * count], self.theirs[: nbytes * count])
        return {name: value - before[name] for name, value in self._counted().items()}


@contextmanager
def joined() -> Iterator[Two]:
    with (
        TransferEngine(EngineOptions("127.0.0.1:0", transports=("rdma",), rdma=FAR)) as far,
        TransferEngine(EngineOptions(transports=("rdma",), rdma=NEAR)) as near,
    ):
        yield Two(near, far)


def test_many_works_need_few_doorbells_and_completions() -> None:
    """One call to the device posts what there is, and one of sixteen asks for a completion."""
    with joined() as two:
        two.move("read", 4096)  # the rail comes up
        counted = two.move("read", 512, 1024)
        assert counted["works"] == 1024
        assert counted["doorbells"] <= 1024 // 4, counted
        assert counted["completions"] <= 1024 // 4, counted


def test_small_writes_are_inline_and_others_not() -> None:
    with joined() as two:
        two.ours[:] = pattern(NBYTES, 9)
        assert two.move("write", INLINE_BYTES, 40)["inlined"] == 40
        assert two.move("write", 4096, 40)["inlined"] == 0


def test_who_waits_for_much_does_not_spin() -> None:
    """A look when it is posted, one before each sleep, and two for each event that ended one."""
    with joined() as two:
        two.move("read", 4096)
        for nbytes, count in ((4096, 1024), (PART, 4)):
            counted = two.move("read", nbytes, count)
            assert counted["polls"] <= 4 * counted["events"] + 8, counted
