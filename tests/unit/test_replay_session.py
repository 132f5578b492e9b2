"""One engine's session against a store that fails, lies and forgets on command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mooncake_py.errors import (
    MasterUnavailable,
    MooncakeError,
    ObjectExists,
    ObjectNotFound,
    OutOfSpace,
    PeerUnreachable,
    TransferTimeout,
)
from mooncake_py.ops.ideal import lru_hits
from mooncake_py.ops.pages import Pages
from mooncake_py.ops.session import BATCH_PAGES_MAX, Session, Tally
from mooncake_py.ops.trace import generate_trace

PAGE_BYTES = 64


class DictStore:
    """Unbounded, and honest unless told otherwise. Records the sizes of its batches."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.refuse_get: dict[str, MooncakeError] = {}
        self.refuse_put: dict[str, MooncakeError] = {}
        self.refuse_call: dict[str, MooncakeError] = {}
        self.calls: list[tuple[str, int]] = []

    def _called(self, name: str, count: int) -> None:
        self.calls.append((name, count))
        if name in self.refuse_call:
            raise self.refuse_call[name]

    def exists(self, keys: Sequence[str], *, prefix: bool = False) -> int:
        assert prefix
        self._called("exists", len(keys))
        return next((i for i, key in enumerate(keys) if key not in self.objects), len(keys))

    def get_batch(self, keys: Sequence[str], into: Sequence[Any]) -> list[Any]:
        self._called("get", len(keys))
        return [self._get(key, target) for key, target in zip(keys, into, strict=True)]

    def _get(self, key: str, target: np.ndarray) -> int | MooncakeError:
        if key in self.refuse_get:
            return self.refuse_get[key]
        if key not in self.objects:
            return ObjectNotFound("no such object", key=key)
        value = self.objects[key]
        target[: len(value)] = np.frombuffer(value, dtype=np.uint8)
        return len(value)

    def put_batch(self, keys: Sequence[str], values: Sequence[Any]) -> list[Any]:
        self._called("put", len(keys))
        return [self._put(key, value) for key, value in zip(keys, values, strict=True)]

    def _put(self, key: str, value: np.ndarray) -> MooncakeError | None:
        if key in self.refuse_put:
            return self.refuse_put[key]
        if key in self.objects:
            return ObjectExists("there already", key=key)
        self.objects[key] = value.tobytes()
        return None


@pytest.fixture
def store() -> DictStore:
    return DictStore()


@pytest.fixture
def session(store: DictStore) -> Session:
    return Session(store, Pages(PAGE_BYTES), Tally())


def test_hits_of_an_unbounded_store_are_those_of_the_model(
    store: DictStore, session: Session
) -> None:
    prompts = [request.hash_ids for request in generate_trace(150)]
    for prompt in prompts:
        session.serve(prompt)
    tally = session.tally
    assert tally.hit_pages == lru_hits(prompts, 1 << 30)
    assert tally.pages == sum(map(len, prompts))
    assert tally.put_bytes == PAGE_BYTES * len(store.objects)
    assert tally.got_bytes == PAGE_BYTES * tally.hit_pages
    assert tally.wrong_bytes == 0
    assert tally.failures == {}


def test_a_request_without_pages_asks_nothing(store: DictStore, session: Session) -> None:
    session.serve([])
    assert store.calls == []
    assert session.tally.requests == 1


def test_long_prompts_move_in_bounded_batches(store: DictStore, session: Session) -> None:
    count = 2 * BATCH_PAGES_MAX + 1
    session.serve(range(count))
    session.serve(range(count))
    sizes = [BATCH_PAGES_MAX, BATCH_PAGES_MAX, 1]
    puts, gets = ([size for name, size in store.calls if name == which] for which in ("put", "get"))
    assert puts == gets == sizes
    assert len(session.tally.latency_ns["exists"]) == 2


def test_a_promised_page_that_does_not_come_ends_the_prefix(
    store: DictStore, session: Session
) -> None:
    session.serve([1, 2, 3, 4])
    store.refuse_get["page/3"] = PeerUnreachable("gone")
    session.serve([1, 2, 3, 4])
    assert session.tally.hit_pages == 2
    assert session.tally.failures == {"get PeerUnreachable": 1}


def test_an_evicted_page_is_a_miss_and_no_failure(store: DictStore, session: Session) -> None:
    session.serve([1, 2, 3])
    store.refuse_get["page/2"] = ObjectNotFound("evicted just now")
    session.serve([1, 2, 3])
    assert session.tally.hit_pages == 1
    assert session.tally.failures == {}


def test_wrong_bytes_are_counted_and_are_no_hit(store: DictStore, session: Session) -> None:
    session.serve([1, 2, 3])
    store.objects["page/2"] = store.objects["page/3"]
    session.serve([1, 2, 3])
    assert session.tally.hit_pages == 1
    assert session.tally.wrong_pages == 1
    assert session.tally.wrong_bytes > PAGE_BYTES / 2


def test_a_short_page_is_wrong(store: DictStore, session: Session) -> None:
    session.serve([1])
    store.objects["page/1"] = store.objects["page/1"][:-8]
    session.serve([1])
    assert session.tally.wrong_pages == 1


def test_failed_puts_are_counted_but_existing_objects_are_fine(
    store: DictStore, session: Session
) -> None:
    store.refuse_put = {"page/1": OutOfSpace("full"), "page/2": ObjectExists("another's")}
    session.serve([1, 2, 3])
    assert session.tally.failures == {"put OutOfSpace": 1}
    assert session.tally.put_bytes == PAGE_BYTES


@pytest.mark.parametrize("operation", ["exists", "get", "put"])
def test_a_call_that_fails_as_a_whole_is_a_miss_of_all_its_pages(
    store: DictStore, session: Session, operation: str
) -> None:
    session.serve([1, 2])
    store.refuse_call[operation] = TransferTimeout("late")
    session.serve([1, 2, 3])
    expected = {"exists": 3, "get": 2, "put": 1}[operation]
    assert session.tally.failures[f"{operation} TransferTimeout"] == expected
    assert session.tally.hit_pages == (2 if operation == "put" else 0)


@pytest.mark.parametrize("operation", ["exists", "get", "put"])
def test_a_master_that_does_not_answer_ends_the_session(
    store: DictStore, session: Session, operation: str
) -> None:
    session.serve([1, 2])
    store.refuse_call[operation] = MasterUnavailable("no answer")
    with pytest.raises(MasterUnavailable):
        session.serve([1, 2, 3])


def test_fetch_reads_what_is_there_and_stores_nothing(store: DictStore, session: Session) -> None:
    session.serve([1, 3])
    session.fetch([1, 2, 3])
    assert session.tally.hit_pages == 2
    assert set(store.objects) == {"page/1", "page/3"}
    assert session.tally.got_bytes == 2 * PAGE_BYTES
