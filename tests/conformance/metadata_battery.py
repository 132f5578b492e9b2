"""What every metadata store promises (rules in `mooncake_py/master/metadata.py`).

A new store joins by a class derived from `MetadataBattery` that gives `open_store`; it brings no
new test idea, only what is peculiar to it.
"""

from __future__ import annotations

import pytest

from mooncake_py.errors import MasterUnavailable
from mooncake_py.master.metadata import MetadataStore


class MetadataBattery:
    """`open_store()` gives a new handle on the same store each time."""

    def open_store(self) -> MetadataStore:
        raise NotImplementedError

    def test_a_new_store_is_empty_and_has_an_identity(self) -> None:
        store = self.open_store()
        loaded = store.load()
        store.close()
        assert (loaded.snapshot, loaded.records, loaded.corrupt) == (None, [], 0)
        assert len(loaded.secret) == 32
        assert loaded.cluster_id
        assert loaded.term >= 1

    def test_identity_stays_and_the_term_grows(self) -> None:
        seen = []
        for _ in range(3):
            store = self.open_store()
            seen.append(store.load())
            store.close()
        assert len({(loaded.cluster_id, loaded.secret) for loaded in seen}) == 1
        assert seen[0].term < seen[1].term < seen[2].term

    def test_a_term_that_was_raised_stays_below_all_later_ones(self) -> None:
        store = self.open_store()
        raised = store.load().term + 1_000
        store.raise_term(raised)
        store.raise_term(raised - 500)  # changes nothing
        store.append([b"goes on"])
        store.close()
        again = self.open_store()
        loaded = again.load()
        again.close()
        assert loaded.term > raised
        assert loaded.records == [b"goes on"]

    def test_records_come_back_in_order(self) -> None:
        records = [b"", b"\x00", b"x" * 100_000, *(b"%d" % i for i in range(500))]
        store = self.open_store()
        store.load()
        first = store.append(records[:3])
        last = store.append(records[3:])
        store.close()
        assert last - first == 500
        again = self.open_store()
        loaded = again.load()
        again.close()
        assert loaded.records == records
        assert loaded.sequence == last

    def test_a_snapshot_replaces_the_records_it_contains(self) -> None:
        store = self.open_store()
        store.load()
        covered = store.append([b"a", b"b"])
        store.append([b"c"])
        store.write_snapshot(b"ab", covered)
        store.append([b"d"])
        store.close()
        again = self.open_store()
        loaded = again.load()
        assert (loaded.snapshot, loaded.records) == (b"ab", [b"c", b"d"])
        again.write_snapshot(b"abcd", loaded.sequence)
        again.close()
        third = self.open_store()
        loaded = third.load()
        third.close()
        assert (loaded.snapshot, loaded.records) == (b"abcd", [])

    def test_sequence_goes_on_after_a_snapshot_of_everything(self) -> None:
        store = self.open_store()
        store.load()
        for round_number in range(4):
            covered = store.append([b"r%d" % round_number])
            store.write_snapshot(b"s%d" % round_number, covered)
        store.close()
        again = self.open_store()
        again.load()
        assert again.append([b"next"]) > covered
        again.close()
        third = self.open_store()
        loaded = third.load()
        third.close()
        assert (loaded.snapshot, loaded.records) == (b"s3", [b"next"])

    def test_a24_a_second_holder_is_refused_and_the_first_goes_on(self) -> None:
        store = self.open_store()
        store.load()
        with pytest.raises(MasterUnavailable, match="in use by another master"):
            self.open_store().load()
        store.append([b"still mine"])
        store.close()
        again = self.open_store()
        assert again.load().records == [b"still mine"]
        again.close()

    def test_using_a_closed_store_is_an_error(self) -> None:
        store = self.open_store()
        store.load()
        store.close()
        store.close()
        with pytest.raises(MasterUnavailable):
            store.append([b"x"])
