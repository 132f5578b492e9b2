"""Two engines that are joined, for the batteries of transports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from transport_far import COMMAND, Far

from mooncake_py._native.memory import address_of
from mooncake_py.transfer import (
    EngineOptions,
    Rdma,
    TransferEngine,
    make_slices,
)

MS = 10_000  # longer than anything here takes; no test waits for it to pass
PART = 1 << 20  # slices are cut into parts of this size on a stream
SIZES = [0, 1, 63, 4096, 8192, 8193, 65_536, PART - 1, PART, PART + 1, 3 * PART + 7]
FAR_PROGRAM = str(Path(__file__).with_name("transport_far.py"))


# Places of the far process, by the command that makes them. Neither a foreign user nor a process
# in a pid namespace may look into the memory of ours.
ELSEWHERE: dict[str, list[str]] = {
    "process": [],
    "foreign": ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"],
    "hidden": ["unshare", "--pid", "--fork", "--kill-child"],
}


def can_be(place: str) -> bool:
    """Whether this machine lets us make the place: root, and files that others may read."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import mooncake_py.transfer"
    root = str(Path(__file__).parents[2])
    command = [*ELSEWHERE[place], sys.executable, "-I", "-c", code, root]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


class Pair:
    """An engine here, one there, and the peer that joins them."""

    def __init__(self, near: TransferEngine, address: str, process: Any = None) -> None:
        self.near = near
        self.address = address
        self.process = process
        self.peer = near.open(address, timeout_ms=MS)

    def tell(self, do: str, **arguments: object) -> Any:
        payload = json.dumps({"do": do, **arguments}).encode()
        answer = json.loads(self.peer.request(COMMAND, payload, timeout_ms=MS))
        assert "failed" not in answer, answer
        return answer["done"]

    def region(
        self, nbytes: int | list[int], kind: str = "memfd", access: str = "read", seed: int = 7
    ) -> int:
        sizes = nbytes if isinstance(nbytes, list) else [nbytes]
        return int(self.tell("register", kind=kind, sizes=sizes, seed=seed, access=access)[0])


def slices_for(region: int, target: np.ndarray, pieces: list[tuple[int, int]]) -> np.ndarray:
    """One slice for each (remote offset, length); they lie one after the other in `target`."""
    slices = make_slices(len(pieces))
    slices["region"] = region
    slices["remote_offset"] = [offset for offset, _ in pieces]
    slices["length"] = [length for _, length in pieces]
    starts = np.cumsum([0, *(length for _, length in pieces)])[:-1]
    slices["local"] = address_of(target)[0] + starts
    return slices


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test in each place where the transport lives."""
    if "place" in metafunc.fixturenames:
        metafunc.parametrize("place", metafunc.cls.places)


class PairedEngines:
    name: ClassVar[str]
    places: ClassVar[tuple[str, ...]] = ("thread", "process")
    maps: ClassVar[bool] = False  # peers' memfds can be mapped
    lanes: ClassVar[int | None] = None
    near_rdma: ClassVar[Rdma] = Rdma()  # the ports of each side
    far_rdma: ClassVar[Rdma] = Rdma()

    @contextmanager
    def pair(self, place: str, **options: Any) -> Iterator[Pair]:
        given = EngineOptions(listen="127.0.0.1:0", transports=(self.name,), **options)
        given = replace(given, tcp_lanes=self.lanes)
        near = TransferEngine(replace(given, rdma=self.near_rdma))
        given = replace(given, rdma=self.far_rdma)
        if place == "thread":
            far = Far(given)
            thread = threading.Thread(target=far.serve)
            thread.start()
            try:
                yield Pair(near, far.engine.address)
            finally:
                near.close()
                far.engine.close()
                thread.join()
            return
        process = start_far(given, ELSEWHERE[place])
        try:
            yield Pair(near, process.stdout.readline().strip(), process)
        finally:
            near.close()
            process.kill()
            process.communicate()

    @pytest.fixture
    def two(self, place: str) -> Iterator[Pair]:
        with self.pair(place) as pair:
            yield pair


def start_far(options: EngineOptions, prefix: list[str] = ELSEWHERE["process"]) -> Any:
    given = {name: value for name, value in asdict(options).items() if name != "faults"}
    return subprocess.Popen(
        [*prefix, sys.executable, FAR_PROGRAM, json.dumps(given)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
