"""Batches and snapshots cut into values: nothing is invented, and damage costs what it touches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mooncake_py.master import chunks

NBYTES = 32  # of payload a chunk here, so that small records span several

RECORDS = st.lists(st.binary(max_size=90), max_size=12)


def _values(records: list[bytes], nonce: int = 7) -> dict[int, bytes]:
    return dict(enumerate(chunks.cut_records(records, nonce, NBYTES)))


@given(RECORDS)
def test_records_come_back_as_they_were(records: list[bytes]) -> None:
    assert chunks.join_records(_values(records)) == chunks.Batch(records, 0)


@given(RECORDS, st.data())
def test_a_damaged_or_missing_chunk_costs_only_what_touches_it(
    records: list[bytes], data: st.DataObject
) -> None:
    values = _values(records)
    hit = data.draw(st.integers(0, len(values) - 1))
    touched = set()
    at = 0
    for number, record in enumerate(records):
        end = at + 4 + len(record)
        if at < (hit + 1) * NBYTES and end > hit * NBYTES:
            touched.add(number)
        at = end
    kept = [record for number, record in enumerate(records) if number not in touched]
    value = values[hit]
    position = data.draw(st.integers(0, len(value) - 1))
    values[hit] = value[:position] + bytes([value[position] ^ 0x40]) + value[position + 1 :]
    batch = chunks.join_records(values)
    assert batch is not None
    assert batch.records == kept
    assert batch.lost == (len(touched) if len(values) > 1 else 1)
    if hit > 0:
        del values[hit]
        assert chunks.join_records(values) == batch


def test_a_batch_without_its_first_chunk_was_never_completed() -> None:
    values = _values([b"a" * 50, b"b" * 50])
    del values[0]
    assert chunks.join_records(values) is None


def test_left_overs_of_an_unfinished_batch_are_no_part_of_the_next() -> None:
    old = _values([b"o" * 100], nonce=1)
    new = _values([b"new"], nonce=2)
    assert chunks.join_records({1: old[1], 2: old[2], 0: new[0]}) == chunks.Batch([b"new"], 0)


@given(st.binary(max_size=200))
def test_snapshots_are_whole_or_nothing(snapshot: bytes) -> None:
    values = dict(enumerate(chunks.cut_snapshot(snapshot, 7, NBYTES)))
    assert len(values) == chunks.snapshot_chunk_count(snapshot, NBYTES)
    assert chunks.join_snapshot(values) == snapshot
    last = len(values) - 1
    damaged = {**values, last: values[last][:-1] + bytes([values[last][-1] ^ 1])}
    assert chunks.join_snapshot(damaged) is None
    del values[last]
    assert chunks.join_snapshot(values) is None
