"""What the master answers, whichever door a call comes through.

A door joins by a class derived from `MasterBattery` with a `client` fixture: a `MasterClient` of a
running master that nothing else uses and whose clock goes by itself.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mooncake_py._native.pulls import grant_mac
from mooncake_py.errors import ObjectExists, ObjectNotFound, QuotaExceeded, UsageError
from mooncake_py.master.client import MasterClient
from mooncake_py.master.commands import Heartbeat, Mount, SetQuota, Unmount
from mooncake_py.model import ReplicaPolicy

T = 5_000  # ms; no call of the battery is meant to wait for it
ALL = 0
SEGMENT_BYTES = 64 << 20


def mount(client: MasterClient, node: str = "node-a", incarnation: int = 1) -> Mount:
    return Mount(node, incarnation, f"10.0.0.{ord(node[-1])}:700", 3, SEGMENT_BYTES, f"host-{node}")


def stored(client: MasterClient, tenant: str, keys: list[bytes], length: int = 100) -> None:
    grants = client.put_start(tenant, keys, [length] * len(keys), timeout_ms=T)
    assert not grants.status.any()
    ended = client.put_end(tenant, keys, grants.generations.tolist(), timeout_ms=T)
    assert not ended.any()


class MasterBattery:
    @pytest.fixture
    def node(self, client: MasterClient) -> int:
        """A mounted segment's id."""
        return client.mount(mount(client), timeout_ms=T).segment_id

    def test_connect_tells_the_limits(self, client: MasterClient) -> None:
        info = client.connect(timeout_ms=T)
        assert info.cluster_id
        assert info.term >= 1
        assert (info.key_max_bytes, info.batch_max_keys) == (4096, 4096)

    def test_life_of_a_batch(self, client: MasterClient, node: int) -> None:
        keys = [b"a", b"b\x00\xff", "schlüssel".encode()]
        lengths = [0, 1, 4096]
        grants = client.put_start("t", keys, lengths, timeout_ms=T)
        assert client.exists("t", keys, timeout_ms=T).tolist() == [0, 0, 0]
        (grant,) = grants.grants
        assert grant.segment.segment_id == node
        assert grant.segment.address == "10.0.0.97:700"
        rows = grant.table()
        assert rows["key_index"].tolist() == [0, 1, 2]
        assert rows["length"].tolist() == lengths
        assert rows["generation"].tolist() == grants.generations.tolist()
        ended = client.put_end("t", keys, grants.generations.tolist(), timeout_ms=T)
        assert ended.tolist() == [ALL] * 3
        assert client.exists("t", [*keys, b"no"], timeout_ms=T).tolist() == [1, 1, 1, 0]
        placements = client.locate("t", [b"no", *keys], timeout_ms=T)
        assert placements.status.tolist() == [ObjectNotFound.code, 0, 0, 0]
        assert placements.rows["key_index"].tolist() == [1, 2, 3]
        for name in ("offset", "length", "generation"):
            assert placements.rows[name].tolist() == rows[name].tolist()
        assert placements.segments[0].segment_id == node
        assert placements.lease_ms > 0

    def test_grants_carry_the_mac_that_the_node_checks(self, client: MasterClient) -> None:
        mounted = client.mount(mount(client), timeout_ms=T)
        (grant,) = client.put_start("", [b"a", b"b"], [1, 2], timeout_ms=T).grants
        assert grant.mac == grant_mac(mounted.segment_id, grant.rows, mounted.grant_secret)

    def test_digests_tell_keys_and_tenants_apart(self, client: MasterClient, node: int) -> None:
        keys = [b"same", b"other"]
        digests = [
            client.put_start(tenant, keys, [1, 1], timeout_ms=T).grants[0].table()["digest"]
            for tenant in ("one", "two")
        ]
        assert len({bytes(d) for table in digests for d in table}) == 4

    def test_a02_f07_a_second_put_is_told_so_per_key(self, client: MasterClient, node: int) -> None:
        stored(client, "", [b"old"])
        grants = client.put_start("", [b"new", b"old"], [1, 1], timeout_ms=T)
        assert grants.status.tolist() == [0, ObjectExists.code]
        assert grants.generations[1] == 0
        assert [row["key_index"] for row in grants.grants[0].table()] == [0]

    def test_a_failed_replica_ends_the_put_of_its_key(
        self, client: MasterClient, node: int
    ) -> None:
        keys = [b"a", b"b"]
        generations = client.put_start("", keys, [1, 1], timeout_ms=T).generations.tolist()
        client.put_end("", keys, generations, failed=[(1, node)], timeout_ms=T)
        assert client.exists("", keys, timeout_ms=T).tolist() == [1, 0]

    def test_revoked_keys_are_free_at_once(self, client: MasterClient, node: int) -> None:
        generations = client.put_start("", [b"a"], [1], timeout_ms=T).generations.tolist()
        assert not client.put_revoke("", [b"a"], generations, timeout_ms=T).any()
        assert client.put_end("", [b"a"], generations, timeout_ms=T).any()
        stored(client, "", [b"a"])

    def test_a08_remove_says_what_it_did(self, client: MasterClient, node: int) -> None:
        stored(client, "", [b"a", b"b", b"leased"])
        client.locate("", [b"leased"], timeout_ms=T)
        removed = client.remove("", [b"a", b"leased", b"absent"], timeout_ms=T)
        assert (removed.removed, removed.kept) == (1, 1)
        assert removed.status[0] == removed.status[2] == 0
        assert removed.status[1] != 0
        forced = client.remove("", [b"leased"], force=True, timeout_ms=T)
        assert (forced.removed, forced.kept) == (1, 0)

    def test_a09_remove_all_stays_in_its_tenant(self, client: MasterClient, node: int) -> None:
        stored(client, "one", [b"x/1", b"x/2", b"y"])
        stored(client, "two", [b"x/1"])
        assert client.remove_all("one", b"x/", timeout_ms=T).removed == 2
        assert client.exists("one", [b"y"], timeout_ms=T).tolist() == [1]
        assert client.exists("two", [b"x/1"], timeout_ms=T).tolist() == [1]

    def test_list_pages_in_key_order(self, client: MasterClient, node: int) -> None:
        keys = sorted(b"p/%03d" % i for i in range(25))
        stored(client, "", [*keys, b"q"], length=7)
        found: list[bytes] = []
        more = True
        while more:
            after = found[-1] if found else b""
            page = client.list("", b"p/", after=after, limit=10, timeout_ms=T)
            assert page.lengths.tolist() == [7] * len(page.keys)
            assert page.replicas.tolist() == [1] * len(page.keys)
            found += page.keys
            more = page.more
        assert found == keys

    def test_prefix_calls_stop_at_the_first_absent_key(
        self, client: MasterClient, node: int
    ) -> None:
        stored(client, "", [b"0", b"1", b"3"])
        keys = [b"0", b"1", b"2", b"3"]
        assert client.exists("", keys, prefix=True, timeout_ms=T).tolist() == [1, 1, 0]
        placements = client.locate("", keys, prefix=True, timeout_ms=T)
        assert placements.status.tolist() == [0, 0, ObjectNotFound.code]
        assert placements.rows["key_index"].tolist() == [0, 1]

    def test_a03_batches_beyond_one_message_are_joined_in_order(
        self, client: MasterClient, node: int
    ) -> None:
        keys = [b"key-%06d" % i for i in range(9_000)]
        grants = client.put_start("", keys, list(range(9_000)), timeout_ms=T)
        assert len(grants.status) == len(grants.generations) == 9_000
        assert len(set(grants.generations.tolist())) == 9_000
        for grant in grants.grants:
            index = grant.key_base + grant.table()["key_index"]
            assert (grant.table()["generation"] == grants.generations[index]).all()
            assert (grant.table()["length"] == index).all()
        failed = [(index, node) for index in (0, 4_095, 4_096, 8_999)]
        generations = grants.generations.tolist()
        client.put_end("", keys, generations, failed=failed, timeout_ms=T)
        absent = np.flatnonzero(client.exists("", keys, timeout_ms=T) == 0)
        assert absent.tolist() == [0, 4_095, 4_096, 8_999]
        placements = client.locate("", keys, timeout_ms=T)
        assert (placements.rows["length"] == placements.rows["key_index"]).all()
        assert len(placements.rows) == 9_000 - 4
        prefix = client.locate("", keys[1:], prefix=True, timeout_ms=T)
        assert len(prefix.status) == 4_095
        removed = client.remove("", keys, force=True, timeout_ms=T)
        assert (len(removed.status), removed.removed) == (9_000, 9_000 - 4)

    def test_long_keys_are_split_by_bytes(self, client: MasterClient, node: int) -> None:
        keys = [b"%04d" % i + b"x" * 4_092 for i in range(4_096)]
        assert client.exists("", keys, timeout_ms=T).tolist() == [0] * 4_096

    def test_an_empty_batch_is_an_empty_answer(self, client: MasterClient, node: int) -> None:
        assert len(client.exists("", [], timeout_ms=T)) == 0
        assert len(client.locate("", [], timeout_ms=T).rows) == 0
        assert client.put_start("", [], [], timeout_ms=T).grants == []
        assert client.remove("", [], timeout_ms=T).removed == 0

    @pytest.mark.parametrize(
        ("keys", "word"), [([b""], "empty"), ([b"k" * 4_097], "longer than 4096")]
    )
    def test_a06_keys_out_of_bounds_are_refused_with_the_limit(
        self, client: MasterClient, keys: list[bytes], word: str
    ) -> None:
        with pytest.raises(UsageError, match=word):
            client.exists("", keys, timeout_ms=T)

    def test_calls_that_do_not_fit_together_are_refused(self, client: MasterClient) -> None:
        with pytest.raises(UsageError, match="1 lengths for 2 keys"):
            client.put_start("", [b"a", b"b"], [1], timeout_ms=T)
        with pytest.raises(UsageError, match="tenant"):
            client.exists("t" * 129, [b"a"], timeout_ms=T)

    def test_a22_reported_placements_are_not_given_out(
        self, client: MasterClient, node: int
    ) -> None:
        stored(client, "", [b"a"])
        row = client.locate("", [b"a"], timeout_ms=T).rows[0]
        client.report("", [b"a"], [int(row["generation"])], [node], [33], timeout_ms=T)
        assert client.locate("", [b"a"], timeout_ms=T).status.tolist() == [ObjectNotFound.code]

    def test_replicas_lie_on_distinct_nodes(self, client: MasterClient, node: int) -> None:
        other = client.mount(mount(client, "node-b"), timeout_ms=T).segment_id
        grants = client.put_start("", [b"a"], [1], ReplicaPolicy(replica_count=2), timeout_ms=T)
        assert {grant.segment.segment_id for grant in grants.grants} == {node, other}

    def test_a24_a_live_name_cannot_be_taken(self, client: MasterClient, node: int) -> None:
        second = Mount("node-a", 2, "10.9.9.9:1", 3, SEGMENT_BYTES, "elsewhere")
        with pytest.raises(UsageError, match="node-a"):
            client.mount(second, timeout_ms=T)
        assert client.heartbeat(Heartbeat("node-a", 1, node), timeout_ms=T).known

    def test_heartbeats_of_strangers_ask_for_a_mount(self, client: MasterClient, node: int) -> None:
        assert client.heartbeat(Heartbeat("node-a", 1, node), timeout_ms=T).known
        assert not client.heartbeat(Heartbeat("node-z", 1, 99), timeout_ms=T).known

    def test_removed_extents_are_unsealed_by_the_next_heartbeat(
        self, client: MasterClient, node: int
    ) -> None:
        stored(client, "", [b"a"])
        generation = int(client.locate("", [b"a"], timeout_ms=T).rows["generation"][0])
        client.remove("", [b"a"], force=True, timeout_ms=T)
        beat = client.heartbeat(Heartbeat("node-a", 1, node), timeout_ms=T)
        assert beat.unseal["generation"].tolist() == [generation]
        again = client.heartbeat(Heartbeat("node-a", 1, node), timeout_ms=T)
        assert len(again.unseal) == 0

    def test_a22_an_unmounted_segment_takes_its_objects_along(
        self, client: MasterClient, node: int
    ) -> None:
        stored(client, "", [b"a"])
        client.unmount(Unmount("node-a", 1, node), timeout_ms=T)
        assert client.exists("", [b"a"], timeout_ms=T).tolist() == [0]

    def test_status_counts(self, client: MasterClient, node: int) -> None:
        stored(client, "", [b"a", b"b"], length=1_000)
        info = client.status(timeout_ms=T)
        assert info.objects == 2
        assert info.capacity_bytes == SEGMENT_BYTES
        assert info.used_bytes >= 2_000
        assert [(s.node, s.state) for s in info.segments] == [("node-a", "alive")]
        received = info.counters["grpc_received_bytes"] + info.counters["lane_received_bytes"]
        assert received > 0

    def test_upsert_replaces_at_the_commit(self, client: MasterClient, node: int) -> None:
        stored(client, "", [b"a"], length=10)
        old = client.locate("", [b"a"], timeout_ms=T).rows["generation"].tolist()
        grants = client.put_start("", [b"a", b"b"], [20, 20], upsert=True, timeout_ms=T)
        assert grants.status.tolist() == [0, 0]
        assert client.locate("", [b"a"], timeout_ms=T).rows["generation"].tolist() == old
        client.put_end("", [b"a", b"b"], grants.generations.tolist(), timeout_ms=T)
        rows = client.locate("", [b"a", b"b"], timeout_ms=T).rows
        assert rows["generation"].tolist() == grants.generations.tolist()
        assert rows["length"].tolist() == [20, 20]

    def test_f44_a_quota_is_kept_and_told(self, client: MasterClient, node: int) -> None:
        client.set_quota(SetQuota("small", keys_max=2), timeout_ms=T)
        keys = [b"a", b"b", b"c"]
        grants = client.put_start("small", keys, [1] * 3, timeout_ms=T)
        assert grants.status.tolist() == [0, 0, QuotaExceeded.code]
        stored(client, "large", keys)
        numbers = {each.name: each for each in client.status(timeout_ms=T).tenants}
        small, large = numbers["small"], numbers["large"]
        assert (small.keys, small.keys_max, small.policy) == (2, 2, "reject")
        assert small.counters["quota_refusals"] == 1
        assert (large.keys, large.policy) == (3, "")
        assert large.used_bytes > 300
        client.set_quota(SetQuota("small", remove=True), timeout_ms=T)
        assert not client.put_start("small", [b"c"], [1], timeout_ms=T).status.any()

    def test_f44_a_quota_that_cannot_be_is_refused(self, client: MasterClient) -> None:
        with pytest.raises(UsageError, match="reject, evict_own, borrow"):
            client.set_quota(SetQuota("t", policy="hope"), timeout_ms=T)

    def test_f46_events_are_replayed_from_a_number(self, client: MasterClient, node: int) -> None:
        stored(client, "t", [b"a"])
        stored(client, "t", [b"b"])
        page = client.events(timeout_ms=T)
        assert [(e.what, e.tenant, e.key) for e in page.events] == [
            ("stored", "t", b"a"), ("stored", "t", b"b"),
        ]  # fmt: skip
        known = page.newest
        assert known == page.events[-1].sequence
        assert client.events(known, timeout_ms=T).events == []
        client.remove("t", [b"a"], timeout_ms=T)
        after = client.events(known, timeout_ms=T)
        assert [(e.sequence, e.what, e.key) for e in after.events] == [(known + 1, "remove", b"a")]
        assert not after.gap
        assert after.events[0].generation == page.events[0].generation
        assert [e.key for e in client.events(known - 1, limit=1, timeout_ms=T).events] == [b"b"]
        assert client.events(known + 100, timeout_ms=T).gap, "of another master"

    def test_f19_a_removal_in_many_steps_is_one_for_its_caller(
        self, client: MasterClient, node: int
    ) -> None:
        keys = [b"%04d" % i for i in range(1_800)]
        stored(client, "t", keys)
        removed = client.remove_all("t", timeout_ms=T)
        assert (removed.removed, removed.kept) == (1_800, 0)
        assert not client.exists("t", keys, timeout_ms=T).any()

    def test_f19_removal_by_pattern(self, client: MasterClient, node: int) -> None:
        stored(client, "t", [b"model-a/1", b"model-b/1", b"model-b/x"])
        removed = client.remove_all("t", b"model-", pattern=rb"b/\d+$", timeout_ms=T)
        assert removed.removed == 1
        assert client.exists("t", [b"model-b/1", b"model-b/x"], timeout_ms=T).tolist() == [0, 1]
        with pytest.raises(UsageError, match="parenthesis"):
            client.remove_all("t", pattern=b"(", timeout_ms=T)

    def test_a17_replicas_lie_in_distinct_failure_domains(self, client: MasterClient) -> None:
        ids = {}
        for node, domain in (("node-a", "r1"), ("node-b", "r1"), ("node-c", "r2")):
            labelled = replace(mount(client, node), domain=domain)
            ids[node] = client.mount(labelled, timeout_ms=T).segment_id
        keys = [b"%d" % i for i in range(20)]
        policy = ReplicaPolicy(replica_count=2)
        grants = client.put_start("", keys, [1] * 20, policy, timeout_ms=T)
        rows = {grant.segment.segment_id: len(grant.table()) for grant in grants.grants}
        assert rows[ids["node-c"]] == 20
