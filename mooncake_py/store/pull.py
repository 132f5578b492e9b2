"""The node's side of a put. Checking, copying, sealing and answering are native (one call serves
pulls until something else comes, native/abi/pulls.h); here is what the node's life changes of it.

Nothing of a request is believed but what the grant's mac covers: rows, and with them offsets,
lengths and generations, come from the master. Where the bytes come from is the client's word, and
can only decide what the client's own object contains.
"""

from __future__ import annotations

from dataclasses import dataclass

from mooncake_py._native.pulls import TIME_UNKNOWN, PullServer
from mooncake_py._native.segment import OwnedSegment
from mooncake_py.clock import boot_ms
from mooncake_py.store.master_time import MasterTime
from mooncake_py.transfer import Message, TransferEngine
from mooncake_py.wire.node import PULL_KIND


@dataclass(frozen=True, slots=True)
class Mounted:
    """What the master answered to the mount."""

    segment_id: int
    grant_secret: bytes
    name_secret: bytes = b""  # keys are hashed under secrets derived from it


class PullHandler:
    """Serves pulls for one segment. Thread-safe; every thread of the node's pool may `serve`."""

    def __init__(
        self,
        engine: TransferEngine,
        segment: OwnedSegment,
        master_time: MasterTime,
    ) -> None:
        self._inbox = engine.inbox
        self._master_time = master_time
        self._server = PullServer(engine.native, segment.native, segment.base, PULL_KIND)
        self._mounted: Mounted | None = None
        self._draining = False

    @property
    def mounted(self) -> Mounted | None:
        return self._mounted

    @mounted.setter
    def mounted(self, mounted: Mounted | None) -> None:
        """None: pulls are refused, and those that run are not sealed. The same again changes
        nothing for them."""
        if mounted != self._mounted:
            if mounted is None:
                self._server.unmount()
            else:
                self._server.mount(mounted.segment_id, mounted.grant_secret, mounted.name_secret)
        self._mounted = mounted

    @property
    def draining(self) -> bool:
        return self._draining

    def drain(self) -> None:
        """Refuse new pulls; those that run may end."""
        self._draining = True
        self._server.drain()

    def follow_time(self) -> None:
        """The master's time was learnt, or forgotten: by it grants end."""
        here_ms = boot_ms()  # before the other: never behind the truth
        latest_ms = self._master_time.latest_ms()
        known = latest_ms < TIME_UNKNOWN
        self._server.set_time(latest_ms - here_ms if known else TIME_UNKNOWN)

    def serve(self, timeout_ms: int) -> Message | None:
        """Serve pulls until something else comes, or the time has passed."""
        return self._inbox.receive(timeout_ms, through=self._server.serve)

    def close(self) -> None:
        """When no thread serves any more."""
        self._server.close()
