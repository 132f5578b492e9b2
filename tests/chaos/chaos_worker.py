"""A client process of a chaos run: puts, reads and removes by a seed, and writes down what it saw.

    python -m tests.chaos.chaos_worker '{"name": ..., "master": ..., "seed": ..., ...}'

Writes begin with a line in the history before they are sent, so that what a killed client may have
done is known. Two threads, one a tenant. SIGTERM ends it. SIGUSR1: stop (SIGSTOP) between the put
start and the pulls of the next put; SIGUSR2: between its pulls and its put end; SIGHUP: not after
all.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import chaos_values

import mooncake_py.store.client as client_module
from mooncake_py import StoreClient
from mooncake_py.errors import (
    LeaseExpired,
    MooncakeError,
    ObjectExists,
    ObjectLeased,
    ObjectNotFound,
    OutOfSpace,
    QuotaExceeded,
    UsageError,
)
from mooncake_py.master.client import MasterClient
from mooncake_py.model import ReplicaPolicy

SIZES = (32, 4_096, 20_000, 65_536)
REFUSALS = (ObjectExists, ObjectLeased, OutOfSpace, QuotaExceeded, UsageError)
PARTS = 4


@dataclass(frozen=True, slots=True)
class Spec:
    name: str
    master: str
    seed: int
    life: int  # how many processes of this name there were before
    history: str
    own_keys: int = 40  # written by this name only
    shared_keys: int = 30  # written by all
    calls_per_second: float = 40  # of each thread
    timeout_ms: int = 3_000
    transports: tuple[str, ...] = ("local", "shm", "tcp")
    streams: bool = False  # puts new keys all the time, so that the nodes fill up


class Trap:
    """Where a signal wants the next put to stop."""

    before_pull = False
    before_end = False

    @classmethod
    def spring(cls, where: str) -> None:
        if getattr(cls, where):
            setattr(cls, where, False)
            os.kill(os.getpid(), signal.SIGSTOP)


class WatchedMaster(MasterClient):
    """The client's connection to the master: notes where replicas are put, and stops at traps."""

    calls = threading.local()

    def put_start(self, *arguments: Any, **options: Any) -> Any:
        grants = super().put_start(*arguments, **options)
        keys = arguments[1]
        places: dict[bytes, dict[int, str]] = {}
        for grant in grants.grants:
            for index in grant.table()["key_index"].tolist():
                key = keys[grant.key_base + index]
                places.setdefault(key, {})[grant.segment.segment_id] = grant.segment.node
        self.calls.places = getattr(self.calls, "places", {}) | places
        Trap.spring("before_pull")
        return grants

    def put_end(self, *arguments: Any, **options: Any) -> Any:
        Trap.spring("before_end")
        keys = arguments[1]
        for index, segment in options.get("failed", ()):
            self.calls.places.get(keys[index], {}).pop(segment, None)
        return super().put_end(*arguments, **options)


client_module.MasterClient = WatchedMaster  # type: ignore[misc]  # the seam: the client's master


class Book:
    """The history file: one line before a write, one after every operation."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._numbers = itertools.count()

    def begin(self, operation: dict[str, Any]) -> None:
        operation["id"] = next(self._numbers)
        operation["began"] = time.monotonic_ns()
        if operation["kind"] in ("put", "upsert", "remove"):
            self._write(operation)

    def end(self, *operations: dict[str, Any]) -> None:
        now = time.monotonic_ns()
        for operation in operations:
            operation["ended"] = now
        self._write(*operations)

    def _write(self, *operations: dict[str, Any]) -> None:
        lines = "".join(json.dumps(operation) + "\n" for operation in operations)
        os.write(self._file, lines.encode())


class Caller(threading.Thread):
    """One thread: a client of its own, for one tenant."""

    def __init__(self, spec: Spec, tenant: str, book: Book, stop: threading.Event) -> None:
        super().__init__(name=tenant)
        self._spec = spec
        self._tenant = tenant
        self._book = book
        self._stop_event = stop
        self._random = random.Random(f"{spec.seed}/{spec.name}/{spec.life}/{tenant}")
        self._client = f"{spec.name}/{tenant}/{spec.life}"
        number = sum(spec.name.encode()) * 1000 + spec.life * 10 + len(tenant)
        self._values = itertools.count(number << 32 | 1)
        self._sizes: dict[int, int] = {}
        self._stream = itertools.count()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self.error = error
            raise

    def _run(self) -> None:
        store = self._open()
        if store is None:
            return
        verbs: list[tuple[Callable[[StoreClient], None], int]] = [
            (self._get, 30), (self._get_batch, 12), (self._view, 7), (self._session, 5),
            (self._exists, 6), (self._put, 14), (self._put_batch, 7), (self._upsert, 8),
            (self._write_session, 3), (self._remove, 8),
        ]  # fmt: skip
        if self._spec.streams:
            verbs.append((self._put_new, 60))
        choices, weights = zip(*verbs, strict=True)
        while not self._stop_event.wait(self._random.expovariate(self._spec.calls_per_second)):
            self._random.choices(choices, weights)[0](store)
        store.close()

    def _open(self) -> StoreClient | None:
        """The masters may all be away for a while."""
        while not self._stop_event.is_set():
            try:
                return StoreClient(
                    self._spec.master,
                    tenant=self._tenant,
                    transports=self._spec.transports,
                    timeout_ms=self._spec.timeout_ms,
                )
            except MooncakeError:
                self._stop_event.wait(0.1)
        return None

    # --- operations -----------------------------------------------------------------------------

    def _full(self, key: str) -> str:
        return f"{self._tenant}/{key}"

    def _operation(self, kind: str, key: str, **more: Any) -> dict[str, Any]:
        operation = {
            "client": self._client, "kind": kind, "key": self._full(key),
            "replicas": replicas_of(key), "limit_ms": self._spec.timeout_ms, **more,
        }  # fmt: skip
        return operation

    def _key_to_read(self) -> str:
        if self._random.random() < 0.35:
            return f"shared/{self._random.randrange(self._spec.shared_keys)}"
        whose = self._random.choice(("c0", "c1", "c2"))
        return f"{whose}/{self._random.randrange(self._spec.own_keys)}"

    def _key_to_write(self) -> str:
        if self._random.random() < 0.3:
            return f"shared/{self._random.randrange(self._spec.shared_keys)}"
        return f"{self._spec.name}/{self._random.randrange(self._spec.own_keys)}"

    def _value(self, key: str) -> tuple[int, bytes]:
        number = next(self._values)
        nbytes = self._random.choice(SIZES)
        return number, chaos_values.make(self._full(key), number, nbytes)

    def _read_outcome(self, operation: dict[str, Any], key: str, found: Any) -> None:
        """Bytes, or an error, into words."""
        if isinstance(found, MooncakeError):
            operation["outcome"] = "miss" if isinstance(found, ObjectNotFound) else "error"
            operation["note"] = words(found)
            return
        try:
            operation["value"] = chaos_values.number_of(self._full(key), found)
            operation["outcome"] = "ok"
        except chaos_values.NotWhole as error:
            operation["outcome"], operation["note"] = "mixed", str(error)

    def _get(self, store: StoreClient) -> None:
        key = self._key_to_read()
        operation = self._operation("get", key)
        self._book.begin(operation)
        found = attempt(lambda: store.get(key))
        self._read_outcome(operation, key, found)
        self._book.end(operation)

    def _get_batch(self, store: StoreClient) -> None:
        keys = list({self._key_to_read() for _ in range(8)})
        operations = [self._operation("get", key, batch=len(keys)) for key in keys]
        for operation in operations:
            self._book.begin(operation)
        found = attempt(lambda: store.get_batch(keys))
        outcomes = [found] * len(keys) if isinstance(found, MooncakeError) else found
        for operation, key, outcome in zip(operations, keys, outcomes, strict=True):
            self._read_outcome(operation, key, outcome)
        self._book.end(*operations)

    def _view(self, store: StoreClient) -> None:
        """Its bytes are the same value when it is taken and when it is released."""
        key = self._key_to_read()
        operation = self._operation("view", key)
        self._book.begin(operation)
        view = attempt(lambda: store.get_view(key))
        self._read_outcome(operation, key, view if isinstance(view, MooncakeError) else view.memory)
        self._book.end(operation)
        if isinstance(view, MooncakeError) or operation["outcome"] != "ok":
            return
        self._stop_event.wait(self._random.uniform(0, 0.2))
        try:
            after = chaos_values.number_of(self._full(key), view.memory)
            what = "" if after == operation["value"] else "another value"
        except chaos_values.NotWhole as error:
            what = str(error)
        try:
            view.release()
        except LeaseExpired:
            return  # it says that its bytes may have changed
        if what:
            again = self._operation("view", key, outcome="mixed", note=f"changed in a view: {what}")
            self._book.begin(again)
            self._book.end(again)

    def _session(self, store: StoreClient) -> None:
        """Part by part: all parts are of one value."""
        key = self._key_to_read()
        operation = self._operation("session", key, limit_ms=0)
        self._book.begin(operation)
        found = attempt(lambda: self._read_parts(store, key))
        self._read_outcome(operation, key, found)
        self._book.end(operation)

    def _read_parts(self, store: StoreClient, key: str) -> bytes | MooncakeError:
        with store.session([key]) as reading:
            if not reading.present[0]:
                return ObjectNotFound("there is no object under the key")
            nbytes = reading.lengths[0]
            step = -(-nbytes // PARTS)
            parts = []
            for offset in range(0, nbytes, step):
                (part,) = reading.read(offset, min(step, nbytes - offset))
                if isinstance(part, ObjectNotFound) and parts:
                    return LeaseExpired("gone in the middle of a session")
                if isinstance(part, MooncakeError):
                    return part
                parts.append(part)
                self._stop_event.wait(self._random.uniform(0, 0.03))
        return b"".join(parts)

    def _exists(self, store: StoreClient) -> None:
        key = self._key_to_read()
        operation = self._operation("exists", key)
        self._book.begin(operation)
        found = attempt(lambda: store.exists(key))
        if isinstance(found, MooncakeError):
            operation |= {"outcome": "error", "note": words(found)}
        else:
            operation["outcome"] = "ok" if found else "miss"
        self._book.end(operation)

    def _write(
        self, kind: str, keys: Sequence[str], call: Callable[[list[bytes]], Any], **more: Any
    ) -> None:
        values = [self._value(key) for key in keys]
        operations = [
            self._operation(kind, key, value=number, batch=len(keys), **more)
            for key, (number, _) in zip(keys, values, strict=True)
        ]
        for operation in operations:
            self._book.begin(operation)
        WatchedMaster.calls.places = {}
        found = attempt(lambda: call([value for _, value in values]))
        outcomes = [found] * len(keys) if isinstance(found, MooncakeError) else found
        places = WatchedMaster.calls.places
        for operation, key, outcome in zip(operations, keys, outcomes, strict=True):
            write_outcome(operation, outcome)
            operation["nodes"] = sorted(places.get(key.encode(), {}).values())
        self._book.end(*operations)

    def _put(self, store: StoreClient) -> None:
        key = self._key_to_write()
        policy = policy_of(key)
        self._write("put", [key], lambda values: store.put_batch([key], values, policy=policy))

    def _put_new(self, store: StoreClient) -> None:
        key = f"{self._spec.name}/{self._spec.life}/stream/{next(self._stream)}"
        self._write("put", [key], lambda values: store.put_batch([key], values))

    def _put_batch(self, store: StoreClient) -> None:
        replicas = self._random.choice((1, 2))
        keys = {self._key_to_write() for _ in range(12)}
        chosen = sorted(key for key in keys if replicas_of(key) == replicas)
        policy = ReplicaPolicy(replica_count=replicas)
        if chosen:
            self._write("put", chosen, lambda v: store.put_batch(chosen, v, policy=policy))

    def _upsert(self, store: StoreClient) -> None:
        key = self._key_to_write()
        policy = policy_of(key)
        self._write(
            "upsert", [key], lambda v: store.put_batch([key], v, policy=policy, upsert=True)
        )

    def _write_session(self, store: StoreClient) -> None:
        key = self._key_to_write()

        def call(values: list[bytes]) -> Any:
            with store.session([key], sizes=[len(values[0])]) as writing:
                half = len(values[0]) // 2
                writing.write(half, [values[0][half:]])
                writing.write(0, [values[0][:half]])
                return writing.commit()

        self._write("put", [key], call, replicas=1)

    def _remove(self, store: StoreClient) -> None:
        keys = list({self._key_to_write() for _ in range(self._random.choice((1, 1, 4)))})
        force = self._random.random() < 0.6
        operations = [self._operation("remove", key, batch=len(keys)) for key in keys]
        for operation in operations:
            self._book.begin(operation)
        found = attempt(lambda: store.remove(keys, force=force))
        outcomes = [found] * len(keys) if isinstance(found, MooncakeError) else found
        for operation, outcome in zip(operations, outcomes, strict=True):
            write_outcome(operation, outcome)
        self._book.end(*operations)


def attempt(call: Callable[[], Any]) -> Any:
    """Its result, or the error that it raised."""
    try:
        return call()
    except MooncakeError as error:
        return error


def write_outcome(operation: dict[str, Any], outcome: MooncakeError | None) -> None:
    if outcome is None:
        operation["outcome"] = "ok"
        return
    operation["outcome"] = "refused" if isinstance(outcome, REFUSALS) else "error"
    operation["note"] = words(outcome)


def words(error: MooncakeError) -> str:
    return f"{type(error).__name__}: {error.cause}"


def replicas_of(key: str) -> int:
    """A key has two replicas or one, always."""
    return 1 + sum(key.encode()) % 2


def policy_of(key: str) -> ReplicaPolicy:
    return ReplicaPolicy(replica_count=replicas_of(key))


def main() -> None:
    given = json.loads(sys.argv[1])
    spec = Spec(**given | {"transports": tuple(given.get("transports", Spec.transports))})
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            Trap.before_pull = True
        elif number == signal.SIGUSR2:
            Trap.before_end = True
        elif number == signal.SIGHUP:
            Trap.before_pull = Trap.before_end = False
        else:
            stop.set()

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, on_signal)
    book = Book(spec.history)
    threads = [Caller(spec, tenant, book, stop) for tenant in ("red", "blue")]
    for thread in threads:
        thread.start()
    sys.stdout.write("worker ready " + json.dumps(asdict(spec)) + "\n")
    sys.stdout.flush()
    for thread in threads:
        while thread.is_alive():  # join in pieces, so that signals are handled here
            thread.join(0.1)
    sys.exit(1 if any(thread.error for thread in threads) else 0)


if __name__ == "__main__":
    main()
