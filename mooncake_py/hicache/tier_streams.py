"""Copies of pages between device and host, and their order among what the engine computes.

On a GPU nothing has happened yet when a call returns. Four rules keep pages whole; the callers
follow them whatever the device is, and tests hold them with a device that does its work late:

1. A copy to the host starts after what wrote the device's pages: it is given the mark that
   `produced` made on the engine's stream when the pages were committed.
2. A copy to the device starts after what last used the device's pages: the same mark, made by the
   request that got them.
3. What reads copied device pages is ordered behind the copy (`order`); the host is not held up.
4. Pages change hands (to the store, to a list of free pages) only after `finish`: the host knows
   that the copy has ended.

The engine computes on one stream for each device, which is torch's current one where it calls us.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mooncake_py.hicache.kv_pages import KvPages, copy_layer, copy_pieces
from mooncake_py.hicache.tier_work import ThreadWork, Work

Mark = Any  # a point in a stream's work


class Streams(Protocol):
    def produced(self) -> Mark:
        """What the caller has given the device to do so far."""

    def copy(
        self,
        source: KvPages,
        target: KvPages,
        layer: int,
        from_pages: Sequence[int],
        to_pages: Sequence[int],
        after: Mark,
    ) -> Mark:
        """Start to copy one layer once `after` is reached."""

    def order(self, mark: Mark) -> None:
        """What the caller gives the device from here on begins after the mark."""

    def finish(self, mark: Mark) -> None:
        """Wait until the mark is reached."""


class CpuStreams:
    """Everything has happened when a call returns."""

    def produced(self) -> Mark:
        return None

    def copy(
        self,
        source: KvPages,
        target: KvPages,
        layer: int,
        from_pages: Sequence[int],
        to_pages: Sequence[int],
        after: Mark,
    ) -> Mark:
        copy_layer(source, target, layer, from_pages, to_pages)
        return None

    def order(self, mark: Mark) -> None: ...

    def finish(self, mark: Mark) -> None: ...


class CudaStreams:
    """A stream for each direction: loads do not queue behind backups. Marks are events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._up, self._down = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def produced(self) -> Mark:
        return self._mark(torch.cuda.current_stream(self._device))

    def copy(
        self,
        source: KvPages,
        target: KvPages,
        layer: int,
        from_pages: Sequence[int],
        to_pages: Sequence[int],
        after: Mark,
    ) -> Mark:
        stream = self._up if target.tensor.is_cuda else self._down
        stream.wait_event(after)
        with torch.cuda.stream(stream):
            copy_pieces(source, target, layer, from_pages, to_pages)
        return self._mark(stream)

    def order(self, mark: Mark) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def finish(self, mark: Mark) -> None:
        mark.synchronize()

    @staticmethod
    def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # who waits for it sleeps
        event.record(stream)
        return event


@dataclass(frozen=True, slots=True)
class Machine:
    """What runs a tiered cache."""

    work: Work
    streams: Streams


def machine_of(device: KvPages) -> Machine:
    cuda = device.tensor.is_cuda
    return Machine(ThreadWork(), CudaStreams(device.tensor.device) if cuda else CpuStreams())
