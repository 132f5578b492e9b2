"""What posting one work request costs: pyverbs beside our engine, between the same two ports.

python -m benchmarks.rdma_posting NEAR FAR    with Debian's python3-pyverbs, or another one

64 WRITEs of 8 bytes, to 64 places, and then their completions: what an engine does for a batch of
small slices. pyverbs builds a request for each, as one must whose addresses differ each time, and
posts them one by one; ours fills an array and makes one call. The bytes and the device's work are
the same, so what differs is the binding. Median of 30 batches, the clock read once a batch.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from mooncake_py._native.memory import address_of
from mooncake_py.transfer import EngineOptions, Rdma, TransferEngine, make_slices
from mooncake_py.transfer.slices import OP_WRITE

COUNT, NBYTES, AREA = 64, 8, 4096
RUNS = 30
MS = 10_000
GID_INDEX = 1  # of soft-RoCE's IPv4 address
DEBIAN = Path("/usr/lib/python3/dist-packages")


def per_operation_us(batch: Callable[[], object]) -> float:
    batch()
    took = []
    for _ in range(RUNS):
        began = time.perf_counter()
        batch()
        took.append(time.perf_counter() - began)
    return statistics.median(took) / COUNT * 1e6


def ours(near: str, far: str) -> dict[str, float]:
    def options(device: str, listen: str = "") -> EngineOptions:
        return EngineOptions(listen, transports=("rdma",), rdma=Rdma(devices=(device,)))

    with ExitStack() as stack:
        there = stack.enter_context(TransferEngine(options(far, "127.0.0.1:0")))
        here = stack.enter_context(TransferEngine(options(near)))
        source, target = np.arange(AREA, dtype=np.uint8), np.zeros(AREA, np.uint8)
        region = there.register(target, access="read_write")
        mine = here.register(source)
        peer = here.open(there.address, timeout_ms=MS)
        slices = make_slices(COUNT)
        places = np.arange(COUNT, dtype=np.uint64) * np.uint64(NBYTES)

        def build() -> None:
            slices["op"], slices["region"], slices["length"] = OP_WRITE, region.id, NBYTES
            slices["remote_offset"] = places
            slices["local"] = places + np.uint64(address_of(source)[0])

        def all_of_it() -> None:
            build()
            here.write(peer, slices, timeout_ms=MS)

        all_of_it()
        moved = COUNT * NBYTES
        assert np.array_equal(target[:moved], source[:moved])
        found = {"build": per_operation_us(build), "all": per_operation_us(all_of_it)}
        mine.close()
        return found


class Side:
    """A queue pair by pyverbs. Its objects are closed in this order: the collector knows none."""

    def __init__(self, device: str) -> None:
        from pyverbs.cq import CQ  # noqa: PLC0415  (its folder has just been added)
        from pyverbs.device import Context  # noqa: PLC0415
        from pyverbs.mr import MR  # noqa: PLC0415
        from pyverbs.pd import PD  # noqa: PLC0415
        from pyverbs.qp import QP, QPCap, QPInitAttr  # noqa: PLC0415

        self.context = Context(name=device)
        self.pd = PD(self.context)
        self.cq = CQ(self.context, 2 * COUNT)
        self.mr = MR(self.pd, AREA, 1 | 2)  # local and remote write
        cap = QPCap(max_send_wr=2 * COUNT, max_recv_wr=1)
        self.qp = QP(
            self.pd, QPInitAttr(qp_type=2, scq=self.cq, rcq=self.cq, cap=cap, sq_sig_all=1)
        )

    def join(self, other: Side) -> None:
        from pyverbs.addr import AHAttr, GlobalRoute  # noqa: PLC0415
        from pyverbs.qp import QPAttr  # noqa: PLC0415

        route = GlobalRoute(dgid=other.context.query_gid(1, GID_INDEX), sgid_index=GID_INDEX)
        attr = QPAttr(port_num=1)
        attr.path_mtu, attr.dest_qp_num, attr.qp_access_flags = 5, other.qp.qp_num, 1 | 2
        attr.min_rnr_timer, attr.timeout, attr.retry_cnt, attr.rnr_retry = 12, 14, 7, 7
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
        attr.ah_attr = AHAttr(port_num=1, is_global=1, gr=route)
        self.qp.to_rts(attr)

    def close(self) -> None:
        for one in (self.qp, self.mr, self.cq, self.pd, self.context):
            one.close()


def theirs(near: str, far: str) -> dict[str, float]:
    from pyverbs.wr import SGE, SendWR  # noqa: PLC0415

    here, there = Side(near), Side(far)
    here.join(there)
    there.join(here)
    local, lkey = here.mr.buf, here.mr.lkey
    remote, rkey = there.mr.buf, there.mr.rkey
    here.mr.write("x" * COUNT * NBYTES, COUNT * NBYTES)

    def build() -> list[Any]:
        requests = []
        for i in range(COUNT):
            request = SendWR(i, num_sge=1, sg=[SGE(local + i * NBYTES, NBYTES, lkey)], opcode=0)
            request.set_wr_rdma(rkey, remote + i * NBYTES)
            requests.append(request)
        return requests

    def post(requests: list[Any]) -> None:
        for request in requests:
            here.qp.post_send(request)
        done = 0
        while done < COUNT:
            done += here.cq.poll(COUNT)[0]

    ready = build()
    try:
        found = {
            "build": per_operation_us(build),
            "post": per_operation_us(lambda: post(ready)),
            "all": per_operation_us(lambda: post(build())),
        }
        assert there.mr.read(COUNT * NBYTES, 0) == b"x" * COUNT * NBYTES
    finally:
        here.close()
        there.close()
    return found


def compare(near: str, far: str) -> None:
    mine = ours(near, far)
    print(f"{'us a WRITE of 8 bytes':32}{'build':>8}{'all':>8}")
    print(f"{'our engine, one call a batch':32}{mine['build']:8.2f}{mine['all']:8.2f}")
    if DEBIAN.exists():
        sys.path.append(str(DEBIAN))  # behind this interpreter's own
    try:
        other = theirs(near, far)
    except ImportError as error:
        print(f"pyverbs is not here: {error} (apt-get install python3-pyverbs)")
        return
    print(f"{'pyverbs, a request each time':32}{other['build']:8.2f}{other['all']:8.2f}")
    print(f"{'pyverbs, requests used again':32}{'':8}{other['post']:8.2f}")


if __name__ == "__main__":
    compare(*sys.argv[1:])
