"""What callers pass in by mistake is refused in words, before anything happens."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake_py.clock import Deadline, ManualClock
from mooncake_py.errors import UsageError
from mooncake_py.model import DEFAULT_POLICY, FOLLOWS, NAMED_GROUP, Group, ReplicaPolicy
from mooncake_py.store.aio import AsyncStoreClient
from mooncake_py.store.arguments import (
    TIMEOUT_MAX_MS,
    check_paired,
    check_policy,
    check_ranges,
    check_timeout,
    group_numbers,
    key_list,
    key_names,
    text_bytes,
)
from mooncake_py.store.buffers import source_pieces, target_pieces
from mooncake_py.store.client import StoreClient
from mooncake_py.store.session import ReadSession
from mooncake_py.store.views import ObjectView
from mooncake_py.transfer.options import native_options, options_for


@pytest.mark.parametrize("keys", ["abc", b"abc", "", [b"abc"], [None], [""], ["\ud800"]])
def test_c07_keys_that_are_none_are_refused(keys: Any) -> None:
    """One str is no list of keys: it would put every letter."""
    with pytest.raises(UsageError, match="key"):
        key_names(keys)


@pytest.mark.parametrize("timeout_ms", [0, -1, float("nan"), "5", None, 10**30, TIMEOUT_MAX_MS + 1])
def test_c07_timeouts_that_are_none_are_refused(timeout_ms: Any) -> None:
    with pytest.raises(UsageError, match="timeout_ms"):
        check_timeout(timeout_ms)


def test_longest_and_shortest_timeout_are_accepted() -> None:
    check_timeout(1)
    check_timeout(TIMEOUT_MAX_MS)


@pytest.mark.parametrize("text", [None, 5, b"bytes", "\ud800"])
def test_c07_texts_that_are_none_are_refused(text: Any) -> None:
    with pytest.raises(UsageError, match="prefix"):
        text_bytes("prefix", text)


@pytest.mark.parametrize("keys", [None, 4, object()])
def test_c07_keys_that_are_no_list_are_refused(keys: Any) -> None:
    for names in (key_names, key_list):
        with pytest.raises(UsageError, match=r"keys are a list of str, not .*Remedy"):
            names(keys)


@pytest.mark.parametrize("values", [None, 5, [], ["a", "b"]])
def test_c07_values_are_one_a_key(values: Any) -> None:
    with pytest.raises(UsageError, match="one value a key"):
        check_paired("value", ["key"], values)


@pytest.mark.parametrize(
    ("policy", "word"),
    [
        ({"replica_count": 2}, "policy"),
        (None, "policy"),
        (ReplicaPolicy(replica_count=0), "replica_count"),
        (ReplicaPolicy(replica_count=1.5), "replica_count"),  # type: ignore[arg-type]  # the mistake
        (ReplicaPolicy(replica_count=10**30), "replica_count"),
        (ReplicaPolicy(ttl_ms=-1), "ttl_ms"),
        (ReplicaPolicy(ttl_ms=10**30), "ttl_ms"),
        (ReplicaPolicy(soft_pin_ms=-1), "soft_pin_ms"),
        (ReplicaPolicy(strict="yes"), "strict"),  # type: ignore[arg-type]  # the mistake
        (ReplicaPolicy(preferred_nodes="nope"), "preferred_nodes"),  # type: ignore[arg-type]  # likewise
        (ReplicaPolicy(preferred_nodes=(5,)), "preferred_nodes"),  # type: ignore[arg-type]  # likewise
    ],
)
def test_c07_policies_that_nobody_can_follow_are_refused(policy: Any, word: str) -> None:
    with pytest.raises(UsageError, match=rf"^{word} is .*Remedy: pass"):
        check_policy(policy)


def test_policies_that_can_be_followed_are_accepted() -> None:
    check_policy(DEFAULT_POLICY)
    check_policy(ReplicaPolicy(2, True, ("a", "b"), 1_000, True, 3_600_000))


@pytest.mark.parametrize("given", [5, (1,), ("1", None), (-1, 2), (0, 1.5), (0, -1), None])
def test_c07_ranges_that_are_none_are_refused(given: Any) -> None:
    with pytest.raises(UsageError, match="a range is"):
        check_ranges(["key"], [given])
    check_ranges(["key", "other"], [(0, None), (3, 0)])


@pytest.mark.parametrize("groups", [5, [1, 2], [-1], ["x"], [1 << 32], [[]], [Group("")]])
def test_c07_groups_that_are_none_are_refused(groups: Any) -> None:
    with pytest.raises(UsageError, match="group"):
        group_numbers("t", ["key"], groups)
    assert group_numbers("t", ["key"], [(1 << 32) - 1]) == [(1 << 32) - 1]
    assert group_numbers("t", ["key"], ()) == []


def test_a18_a_groups_name_has_a_number_of_its_own_in_each_tenant() -> None:
    first, follower, of_others = (
        group_numbers(tenant, ["key"], [group])[0]
        for tenant, group in (("t", Group("g")), ("t", Group("g", True)), ("u", Group("g")))
    )
    assert first & (NAMED_GROUP | FOLLOWS) == NAMED_GROUP
    assert follower == first | FOLLOWS
    assert of_others & NAMED_GROUP
    assert of_others != first


@pytest.mark.parametrize("names", ["tcp", None, (5,)])
def test_c07_transports_are_a_tuple_of_names(names: Any) -> None:
    with pytest.raises(UsageError, match=r"transports are a tuple of names.*Remedy: pass a tuple"):
        options_for(names)


def test_c07_an_unknown_transport_is_answered_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"choose of local, shm, tcp, rdma$"):
        native_options(options_for(("udp",)))
    native_options(options_for(("tcp",)))


def test_c07_a_target_that_is_read_only_is_answered_with_what_is_not() -> None:
    with pytest.raises(UsageError, match="Remedy: pass a bytearray"):
        target_pieces([b"read-only"])


def test_c07_a_text_is_answered_with_how_it_becomes_bytes() -> None:
    with pytest.raises(UsageError, match=r"this str is no readable .*Remedy: .*value\.encode\(\)"):
        source_pieces(["text"])


def test_c07_addresses_and_names_are_texts() -> None:
    with pytest.raises(UsageError, match="master is a str, not NoneType"):
        StoreClient(None)  # type: ignore[arg-type]  # the mistake
    with pytest.raises(UsageError, match="tenant is a str, not int"):
        StoreClient("127.0.0.1:1", tenant=5)  # type: ignore[arg-type]  # likewise
    with pytest.raises(UsageError, match=r"await AsyncStoreClient.open"):
        AsyncStoreClient("127.0.0.1:1")  # type: ignore[arg-type]  # likewise


def test_what_the_client_hands_out_says_what_it_is() -> None:
    assert repr(ObjectView("key", b"four")) == (
        "<ObjectView 'key': 4 bytes in .memory, a private copy>"
    )
    clock = ManualClock()
    reading = ReadSession(
        ["a", "b"], lambda _: ([b"", b""], [0, 0]), lambda *_: [], lambda: Deadline(1, clock),
        clock.now_ms, lambda _: pytest.fail("nothing lies anywhere"),
    )  # fmt: skip
    assert repr(reading) == "<ReadSession of 2 keys, 0 readable>"
