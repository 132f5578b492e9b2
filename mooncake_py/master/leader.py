"""Who leads, asked of etcd: for clients that are given its address instead of the masters'.

The leader's key is read when there is no leader yet, and when the one that was known does not
answer; as long as it does, etcd is not asked. Thread-safe.
"""

from __future__ import annotations

import logging
import threading

from mooncake_py.clock import Clock, Deadline
from mooncake_py.errors import MasterUnavailable
from mooncake_py.master.etcd import EtcdAddress, EtcdClient
from mooncake_py.master.etcd_session import leader_of

log = logging.getLogger(__name__)

ASK_MS = 750  # for etcd, while a master is being looked for
AGAIN_MS = 50


class LeaderFinder:
    def __init__(self, text: str, clock: Clock) -> None:
        """Raises UsageError for what is no address of etcd. Nothing is connected yet."""
        self._address = EtcdAddress.parse(text)
        self._client = EtcdClient(self._address, clock)
        self._key = f"{self._address.prefix}leader".encode()
        self._clock = clock
        self._pause = threading.Event()  # never set: to wait a little

    def find(self, timeout_ms: int = ASK_MS) -> str:
        """HOST:PORT of the leader; "": nobody leads just now, or etcd does not say."""
        try:
            held, _ = self._client.get(self._key, timeout_ms)
        except MasterUnavailable as error:
            log.debug("who leads is not known: %s", error)
            return ""
        leader = leader_of(held)
        return leader.address if leader is not None else ""

    def wait(self, timeout_ms: int) -> str:
        """Until somebody leads. Raises MasterUnavailable."""
        deadline = Deadline(timeout_ms, self._clock)
        while not (address := self.find(max(1, min(ASK_MS, deadline.left_ms())))):
            if deadline.passed():
                raise MasterUnavailable(
                    f"no master leads under {self._address}, or etcd does not answer",
                    remedy="start etcd and a mooncake-master with --metadata and this address",
                )
            self._pause.wait(AGAIN_MS / 1000)
        return address

    def close(self) -> None:
        self._client.close()
