"""Nodes as recovery sees them, and a master that is killed with its last records or without any."""

from __future__ import annotations

from catalog_model import Driver, check_invariants, grant_rows

from mooncake_py.master.catalog import Catalog
from mooncake_py.master.commands import (
    Inventoried,
    Inventory,
    List,
    Listed,
    Mount,
    Mounted,
    Name,
    Remove,
)
from mooncake_py.master.settings import CatalogSettings
from mooncake_py.model import EXTENT_ROW, MEMBERS_SHIFT, REPLICA_ROW

MIB = 1 << 20
SETTINGS = CatalogSettings(objects_max=1 << 14)


class ModelNode:
    """A node as recovery sees it: what is sealed, and the conversation after a mount."""

    def __init__(self, name: str, nbytes: int = MIB) -> None:
        self.name, self.nbytes = name, nbytes
        self.incarnation, self.segment_id = 1, 0
        self.foreign = self.keeps = False
        self.term = 1
        self.sealed: dict[
            int, tuple[int, int, Name, int]
        ] = {}  # offset -> length, gen, name, group

    def command(self, *, warm: bool = False) -> Mount:
        return Mount(
            self.name, self.incarnation, f"{self.name}:{self.incarnation}", 1, self.nbytes,
            self.name, self.segment_id, recovers=True, foreign=self.foreign, warm=warm,
            keeps=self.keeps, former_term=self.term,
        )  # fmt: skip

    def mount(self, master: Driver, *, warm: bool = False) -> Mounted:
        reply = self._apply(master, self.command(warm=warm))
        assert isinstance(reply, Mounted)
        self.term = max(self.term, master.catalog.state.term)
        if self.segment_id and reply.segment_id != self.segment_id:
            self.sealed.clear()
        self.segment_id, self.foreign = reply.segment_id, False
        return reply

    def _apply(self, master: Driver, command: Mount | Inventory) -> object:
        applied = master.apply(command)
        if applied.term_wanted:  # by now it is durable
            master.log += master.catalog.raise_term(applied.term_wanted)
            applied = master.apply(command)
        for effect in applied.effects:
            if effect.segment_id == self.segment_id:
                self.unseal(effect.rows)
        return applied.reply

    def unseal(self, rows: bytes) -> None:
        for _, _, offset, _, generation, *_ in EXTENT_ROW.iter_unpack(rows):
            if offset in self.sealed and self.sealed[offset][1] == generation:
                del self.sealed[offset]

    def ask(self, master: Driver, **fields: object) -> Inventoried:
        command = Inventory(self.name, self.incarnation, self.segment_id, **fields)  # type: ignore[arg-type]
        reply = self._apply(master, command)
        assert isinstance(reply, Inventoried), reply
        self.unseal(reply.unseal)
        return reply

    def name_all(self, master: Driver, offsets: list[int]) -> None:
        for at in range(0, len(offsets), 3):
            rows, names = [], []
            for offset in offsets[at : at + 3]:
                length, generation, name, group = self.sealed[offset]
                size = self.group_size << MEMBERS_SHIFT if group else 0
                row = (0, size, offset, length, generation, 0, bytes(16), group)
                rows.append(EXTENT_ROW.pack(*row))
                names.append(name)
            self.ask(master, rows=b"".join(rows), names=names)

    def recover(self, master: Driver, mounted: Mounted) -> None:
        """The whole conversation."""
        if not mounted.recover:
            return
        wanted = [
            offset for offset, (_, generation, _, _) in sorted(self.sealed.items())
            if any(start <= generation < below for start, below in mounted.unrecorded)
        ]  # fmt: skip
        self.name_all(master, wanted)
        self.ask(master, recorded=True)
        cursor, absent, more, seen = 0, b"", True, set()
        while more:
            reply = self.ask(master, compare=True, cursor=cursor, absent=absent)
            believed = list(REPLICA_ROW.iter_unpack(reply.believed))
            held = {(offset, each[1]) for offset, each in self.sealed.items()}
            absent = b"".join(REPLICA_ROW.pack(*each) for each in believed if each not in held)
            seen |= set(believed) & held
            cursor, more = reply.cursor, reply.more
        self.ask(master, cursor=cursor, absent=absent)
        rest = [
            offset for offset, (_, generation, _, _) in sorted(self.sealed.items())
            if (offset, generation) not in seen and generation < mounted.first_generation
        ]  # fmt: skip
        self.name_all(master, rest)


class Cluster:
    """Driver and nodes; puts seal what was granted; effects reach the nodes."""

    def __init__(self, *names: str) -> None:
        self.driver = Driver(settings=SETTINGS)
        self.term = 0
        self.durable = 0  # records of the log that a crash leaves
        self.nodes = {name: ModelNode(name) for name in names}
        self.begin(Catalog(SETTINGS))
        for node in self.nodes.values():
            node.mount(self.driver)

    def begin(self, catalog: Catalog, *, foreign_until_ms: int = 0, term: int = 0) -> None:
        self.term = term or max(self.term, self.driver.catalog.state.term) + 1
        self.driver.catalog = catalog
        first = catalog.begin_term(self.term, self.driver.now_ms, foreign_until_ms)
        self.driver.log += first

    def put(self, key: bytes, *, commit: bool = True, nbytes: int = 1000, **policy: object) -> int:
        granted = self.driver.start([key], nbytes, **policy)
        assert granted.status == b"\0"
        for _, segment_id, offset, length, generation in grant_rows(granted):
            for node in self.nodes.values():
                if node.segment_id == segment_id:
                    overlapped = [
                        at for at, each in node.sealed.items()
                        if at < offset + length + 64 and offset < at + each[0] + 64
                    ]  # fmt: skip
                    for at in overlapped:
                        del node.sealed[at]
                    hard = bool(policy.get("hard_pin"))
                    ttl = int(policy.get("ttl_ms", 0) or 0)  # type: ignore[call-overload]
                    name = Name("t", key, 0, self.driver.now_ms + ttl if ttl else 0, hard)
                    node.sealed[offset] = (length, generation, name, 0)
        if commit:
            assert self.driver.end([key], [granted.generations[0]]) == [0]
        return granted.generations[0]

    def remove(self, key: bytes) -> None:
        applied = self.driver.apply(Remove("t", [key], True))
        for effect in applied.effects:
            for node in self.nodes.values():
                if node.segment_id == effect.segment_id:
                    node.unseal(effect.rows)

    def crash(self, lost_records: int, *, nodes: bool = True, foreign_until_ms: int = 0) -> None:
        """The master is killed; so many of its newest records had not reached the store."""
        log = self.driver.log
        del log[len(log) - lost_records :]
        catalog = Catalog(SETTINGS)
        report = catalog.restore(None, log, self.driver.now_ms)
        assert not report.damaged_records
        self.begin(catalog, foreign_until_ms=foreign_until_ms)
        if nodes:
            self.return_all()

    def forget(self, term: int = 0) -> None:
        """The database is deleted, too."""
        self.driver.log.clear()
        until = self.driver.now_ms + SETTINGS.recovery_ms
        self.begin(Catalog(SETTINGS), foreign_until_ms=until, term=term or self.term + 10)
        for node in self.nodes.values():
            node.foreign = True

    def return_all(self) -> None:
        for node in self.nodes.values():
            node.recover(self.driver, node.mount(self.driver))
        check_invariants(self.driver.catalog)

    def keys(self) -> list[bytes]:
        reply = self.driver.apply(List("t", b"", b"", 1000)).reply
        assert isinstance(reply, Listed)
        return list(reply.keys)
