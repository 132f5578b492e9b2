"""What the catalog believes of nodes: after lost records, lost databases, and lost memory.

The rules are in design/recovery.md."""

from __future__ import annotations

from itertools import count

import pytest
from catalog_model import check_invariants, grant_rows
from catalog_nodes import SETTINGS, Cluster
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_py.errors import Backpressure, ObjectNotFound
from mooncake_py.master import records
from mooncake_py.master.catalog import Catalog
from mooncake_py.master.commands import (
    CopyObjects,
    Granted,
    Heartbeat,
    Inventoried,
    Inventory,
    Name,
    PutStart,
    Refused,
    Remove,
    TaskList,
    Tasks,
    Unmount,
)
from mooncake_py.model import EXTENT_ROW, MEMBERS_SHIFT, PLACEMENT_ROW, RESERVED_ROW


def test_f11_puts_whose_records_were_lost_are_adopted() -> None:
    cluster = Cluster("a", "b")
    cluster.put(b"old")
    kept = len(cluster.driver.log)
    for i in range(7):
        cluster.put(b"new%d" % i, replica_count=2)
    cluster.crash(len(cluster.driver.log) - kept)
    assert cluster.keys() == [b"new%d" % i for i in range(7)] + [b"old"]
    located = cluster.driver.locate([b"new0"])
    assert len(located.placements) == 2 * PLACEMENT_ROW.size  # both replicas are back
    # and they are in the log from now on
    cluster.crash(0, nodes=False)
    assert len(cluster.keys()) == 8


def test_f11_a_put_whose_commit_was_lost_counts_and_its_writer_is_told_so() -> None:
    cluster = Cluster("a")
    generation = cluster.put(b"k")
    cluster.crash(1)
    assert cluster.keys() == [b"k"]
    assert cluster.driver.end([b"k"], [generation]) == [0]


def test_f11_what_a_node_told_the_master_before_is_not_the_end_of_what_this_one_asked() -> None:
    """The node tells on a thread of its own; its last page for a master that died may arrive after
    the mount with the next one, which then took all that was yet to be told for ended."""
    cluster = Cluster("a")
    node = cluster.nodes["a"]
    cluster.put(b"k")
    cluster.crash(1, nodes=False)
    before = node.mount(cluster.driver)
    cluster.crash(0, nodes=False)
    now = node.mount(cluster.driver)
    assert now.first_generation > before.first_generation
    who = (node.name, node.incarnation, node.segment_id)
    for page in ({"recorded": True}, {"compare": True}):
        stale = Inventory(*who, **page, first_generation=before.first_generation)  # type: ignore[arg-type]
        reply = cluster.driver.apply(stale).reply
        assert isinstance(reply, Refused)
        assert reply.code == ObjectNotFound.code
    assert cluster.driver.start([b"new"]).status != b"\0", "nothing is placed there yet"
    node.recover(cluster.driver, now)
    assert cluster.keys() == [b"k"]
    done = Inventory(*who, recorded=True, first_generation=now.first_generation)
    assert isinstance(cluster.driver.apply(done).reply, Inventoried)


@pytest.mark.parametrize("copies", [1, 2])
def test_f11_a_grant_that_ran_out_before_its_nodes_have_told_counts(copies: int) -> None:
    """The disk of the log was full when the put was acknowledged, and the next master took longer
    to come than the grant was valid."""
    cluster = Cluster("a", "b")
    driver = cluster.driver
    generation = cluster.put(b"k", replica_count=copies)
    cluster.crash(1, nodes=False)
    driver.pass_time(SETTINGS.grant_ttl_ms + SETTINGS.grant_margin_ms + 1_000)
    assert driver.start([b"k"]).status != b"\0"  # as long as it may be stored
    cluster.return_all()
    assert cluster.keys() == [b"k"]
    assert driver.end([b"k"], [generation]) == [0]
    cluster.crash(0)  # and it is in the log from now on
    assert cluster.keys() == [b"k"]


def test_f11_a_grant_that_no_node_holds_runs_out_once_they_have_told() -> None:
    cluster = Cluster("a", "b")
    driver = cluster.driver
    cluster.put(b"k", replica_count=2)
    for node in cluster.nodes.values():
        node.sealed.clear()  # its bytes had not arrived when the master was killed
    cluster.crash(1, nodes=False)
    driver.pass_time(SETTINGS.grant_ttl_ms + 1_000)
    cluster.return_all()
    driver.pass_time(2_000)
    assert driver.catalog.state.counters["grants_reclaimed"] == 1
    cluster.put(b"k")
    check_invariants(driver.catalog)


def test_f11_an_object_lost_with_its_nodes_is_found_in_a_copy_that_is_told_of_later() -> None:
    """The copy was made for a lost replica, and its record was lost with the master."""
    cluster = Cluster("a", "b", "c")
    driver, (a, b, c) = cluster.driver, cluster.nodes.values()
    generation = cluster.put(b"k", preferred_nodes=("a",))
    younger = cluster.put(b"young", preferred_nodes=("b",))
    kept = len(driver.log)
    own = cluster.put(b"not recorded", preferred_nodes=("c",))
    offset = next(iter(c.sealed))
    c.sealed = {
        offset: (1000, own, Name("t", b"k", generation=generation), 0),
        offset + 8192: (1000, own + 1, Name("t", b"young", generation=generation), 0),
    }
    cluster.crash(len(driver.log) - kept, nodes=False)
    driver.now_ms += 2_000
    for node in (a, b):  # they come without their memory, and what they had ends
        node.incarnation, node.sealed = 2, {}
        node.recover(driver, node.mount(driver))
    driver.pass_time(500)
    assert cluster.keys() == []
    c.recover(driver, c.mount(driver))
    assert younger > generation
    assert cluster.keys() == [b"k"]  # and not what something younger had replaced
    check_invariants(driver.catalog)


def test_f64_without_any_record_the_nodes_say_what_there_is() -> None:
    cluster = Cluster("a", "b")
    for i in range(10):
        cluster.put(b"k%d" % i, replica_count=2, hard_pin=i == 3)
    for i in range(5):
        cluster.remove(b"k%d" % (2 * i))
    cluster.put(b"mortal", ttl_ms=500)
    cluster.driver.now_ms += 1_000
    cluster.forget()
    cluster.return_all()
    assert cluster.keys() == [b"k1", b"k3", b"k5", b"k7", b"k9"]
    assert cluster.driver.catalog.state.hard_pinned_units == 2 * 17
    cluster.put(b"k1x")  # generations go on above those of the lost cluster
    check_invariants(cluster.driver.catalog)


def test_f64_a_log_that_ends_early_costs_nothing_that_nodes_hold() -> None:
    """Wherever it is cut, also before the segments were mounted that the nodes still have."""
    expected = [b"k0", b"k1", b"k3", b"k4", b"k5"]
    for kept in count():
        cluster = Cluster("a", "b")
        for i in range(6):
            cluster.put(b"k%d" % i, replica_count=1 + i % 2)
        cluster.remove(b"k2")
        log = cluster.driver.log
        if kept and isinstance(records.decode(log[kept - 1]), records.Marks):
            continue  # written in one transaction with the segment that it is for
        lost = len(log) - kept
        cluster.crash(lost)
        assert cluster.keys() == expected, kept
        cluster.put(b"new")
        cluster.crash(0)
        assert cluster.keys() == [*expected, b"new"], kept
        if not lost:
            return


def test_f64_a_segment_that_was_given_up_is_not_taken_for_one_that_the_log_lost() -> None:
    cluster = Cluster("a")
    cluster.put(b"k")
    node = cluster.nodes["a"]
    cluster.driver.apply(Unmount("a", 1, node.segment_id))
    cluster.driver.pass_time(500, alive=False)
    before = node.segment_id
    cluster.crash(0)
    assert node.segment_id != before
    assert cluster.keys() == []


def test_f64_nothing_is_placed_on_a_node_before_it_has_told() -> None:
    cluster = Cluster("a")
    cluster.put(b"k")
    cluster.forget()
    node = cluster.nodes["a"]
    mounted = node.mount(cluster.driver)
    assert mounted.recover
    cluster.driver.apply(Heartbeat("a", 1, node.segment_id))
    assert cluster.driver.start([b"new"]).status != b"\0"
    node.recover(cluster.driver, mounted)
    assert cluster.keys() == [b"k"]
    cluster.put(b"new")


@pytest.mark.parametrize("how", ["records lost", "database lost"])
def test_f64_what_was_removed_while_its_node_was_away_stays_removed(how: str) -> None:
    cluster = Cluster("a")
    kept = len(cluster.driver.log)
    cluster.put(b"k")
    if how == "database lost":
        cluster.forget()
    else:
        cluster.crash(len(cluster.driver.log) - kept, nodes=False)
    assert cluster.keys() == []  # its node has not come yet
    cluster.remove(b"k")
    until_ms = cluster.driver.now_ms + SETTINGS.recovery_ms if how == "database lost" else 0
    cluster.crash(0, nodes=False, foreign_until_ms=until_ms)  # the removal is in the log
    cluster.return_all()
    assert cluster.keys() == []
    assert not cluster.nodes["a"].sealed


def test_f64_removal_of_all_reaches_what_comes_to_light_later() -> None:
    cluster = Cluster("a")
    kept = len(cluster.driver.log)
    for key in (b"page/1", b"page/2", b"other"):
        cluster.put(key)
    cluster.crash(len(cluster.driver.log) - kept, nodes=False)
    cluster.driver.apply(Remove("t", (), True, True, b"page/"))
    cluster.return_all()
    assert cluster.keys() == [b"other"]


def test_f64_an_adopted_object_that_was_removed_is_not_adopted_again() -> None:
    cluster = Cluster("a")
    kept = len(cluster.driver.log)
    cluster.put(b"k")
    cluster.crash(len(cluster.driver.log) - kept)
    assert cluster.keys() == [b"k"]
    memory = dict(cluster.nodes["a"].sealed)
    cluster.remove(b"k")
    cluster.nodes["a"].sealed = memory  # the order to unseal was lost
    cluster.crash(0)
    assert cluster.keys() == []


def test_f11_the_younger_of_two_nodes_is_right() -> None:
    cluster = Cluster("a", "b")
    cluster.put(b"k", preferred_nodes=("a",))
    cluster.remove(b"k")
    old = Name("t", b"k")
    cluster.put(b"k", preferred_nodes=("b",))
    a, b = cluster.nodes["a"], cluster.nodes["b"]
    a.sealed[0] = (1000, 1 << 21, old, 0)  # was away when it was removed
    (young,) = [each[1] for each in b.sealed.values()]
    for order in ((a, b), (b, a)):
        kept = dict(a.sealed), dict(b.sealed)
        cluster.forget()
        for node in order:
            node.recover(cluster.driver, node.mount(cluster.driver))
        located = cluster.driver.locate([b"k"])
        assert located.status == b"\0"
        assert len(located.placements) == PLACEMENT_ROW.size
        assert young.to_bytes(8, "little") in located.placements
        assert order[0] is a or not a.sealed  # (else once its readers' leases are over)
        a.sealed, b.sealed = kept


def test_a25_extents_written_over_others_displace_what_the_log_believes_there() -> None:
    cluster = Cluster("a")
    cluster.put(b"evicted")
    kept = len(cluster.driver.log)
    cluster.remove(b"evicted")
    cluster.driver.pass_time(20_000)
    cluster.put(b"new")  # in the same place
    assert list(cluster.nodes["a"].sealed) == [0]
    cluster.crash(len(cluster.driver.log) - kept)
    assert cluster.keys() == [b"new"]


def test_f40_a_new_process_on_the_same_memory_keeps_the_segment() -> None:
    cluster = Cluster("a")
    node = cluster.nodes["a"]
    node.keeps = True
    node.mount(cluster.driver)
    for i in range(4):
        cluster.put(b"k%d" % i)
    node.incarnation = 2
    torn = next(iter(node.sealed))
    del node.sealed[torn]
    node.recover(cluster.driver, node.mount(cluster.driver, warm=True))
    assert cluster.keys() == [b"k1", b"k2", b"k3"]
    cluster.put(b"k0")
    check_invariants(cluster.driver.catalog)


def test_f40_a_kept_segment_is_waited_for_and_then_forgotten() -> None:
    cluster = Cluster("a", "b")
    node = cluster.nodes["a"]
    node.keeps = True
    node.mount(cluster.driver)
    cluster.put(b"k", preferred_nodes=("a",))
    cluster.put(b"again", preferred_nodes=("a",))
    applied = cluster.driver.apply(Unmount("a", 1, node.segment_id, returns=True))
    assert applied.records == []
    assert cluster.driver.exists([b"k", b"again"]) == [0, 0]
    cluster.put(b"again", preferred_nodes=("b",))  # no obstacle: nobody can read the old one
    node.incarnation = 2
    node.recover(cluster.driver, node.mount(cluster.driver, warm=True))
    assert cluster.driver.exists([b"k", b"again"]) == [1, 1]
    assert len(cluster.driver.locate([b"again"]).placements) == PLACEMENT_ROW.size
    cluster.driver.apply(Unmount("a", 2, node.segment_id, returns=True))
    silent_ms = SETTINGS.dead_ms + SETTINGS.away_ms
    b = cluster.nodes["b"]
    for _ in range(silent_ms // 5_000 + 2):
        cluster.driver.now_ms += 5_000
        cluster.driver.apply(Heartbeat("b", 1, b.segment_id))
        cluster.driver.pass_time(1, alive=False)
    assert cluster.keys() == [b"again"]
    node.incarnation = 3
    node.recover(cluster.driver, node.mount(cluster.driver, warm=True))
    assert not node.sealed  # another segment now


@settings(deadline=None)
@given(data=st.data())
def test_f64_a_history_cut_anywhere_loses_no_put_and_raises_no_dead(data: st.DataObject) -> None:
    """Puts and removals over few keys; the master dies with any part of its unacknowledged tail;
    acknowledged puts are there, acknowledged removals are not undone."""
    cluster = Cluster("a", "b")
    truth: dict[bytes, bool] = {}
    durable = len(cluster.driver.log)
    for _ in range(data.draw(st.integers(1, 25))):
        key = b"k%d" % data.draw(st.integers(0, 4))
        action = data.draw(st.sampled_from(["put", "put", "remove", "crash", "forget"]))
        if action == "put" and not truth.get(key):
            cluster.put(key, replica_count=data.draw(st.integers(1, 2)))
            truth[key] = True
        elif action == "remove":
            cluster.remove(key)
            truth[key] = False
            durable = len(cluster.driver.log)
        elif action == "crash":
            cluster.crash(data.draw(st.integers(0, len(cluster.driver.log) - durable)))
            durable = len(cluster.driver.log)
        elif action == "forget":
            cluster.forget()
            cluster.return_all()
            durable = len(cluster.driver.log)
        assert cluster.keys() == sorted(key for key, there in truth.items() if there)
    check_invariants(cluster.driver.catalog)


def test_f10_leases_are_renewed_by_readers_and_end_by_themselves() -> None:
    """A read that takes longer than a lease renews it; a reader that died leaves nothing behind,
    and neither does a change of the master."""
    cluster = Cluster("a")
    driver = cluster.driver
    cluster.put(b"k")
    for _ in range(3):  # a long read, renewed in time
        driver.locate([b"k"])
        driver.pass_time(SETTINGS.lease_ms - 100)
        assert driver.remove([b"k"]).kept == 1
    cluster.crash(0)  # the new master knows of no lease, and honours all there may be
    assert driver.remove([b"k"]).kept == 1
    driver.pass_time(SETTINGS.lease_ms + 1_000)
    assert driver.remove([b"k"]).removed == 1


def grouped(cluster: Cluster, keys: list[bytes]) -> None:
    """Puts them as one group, on both nodes."""
    driver = cluster.driver
    granted = driver.apply(
        PutStart("t", keys, [1000] * 4, bytes(64), groups=[7] * 4, random=3)
    ).reply
    assert isinstance(granted, Granted)
    for segment_id, rows in zip(granted.segment_ids, granted.rows, strict=True):
        (node,) = [each for each in cluster.nodes.values() if each.segment_id == segment_id]
        for index, upper, offset, length, generation, _, _, group in EXTENT_ROW.iter_unpack(rows):
            node.sealed[offset] = (length, generation, Name("t", keys[index]), group)
            node.group_size = upper >> MEMBERS_SHIFT
            assert node.group_size == len(keys)
    assert driver.end(keys, list(granted.generations)) == [0] * 4
    a, b = cluster.nodes["a"], cluster.nodes["b"]
    if not b.sealed:  # placement may have chosen one node: move one over
        offset, extent = a.sealed.popitem()
        b.sealed[offset], b.group_size = extent, 4


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("first", ["a", "b"])
def test_f11_a_put_without_a_key_counts_if_what_its_key_named_is_there_no_more(
    first: str, is_there: bool
) -> None:
    """The log believes the key taken. It was when the put came, so that was refused; or it was not,
    the records of both are lost, and the put was acknowledged. The former's node knows."""
    cluster = Cluster("a", "b")
    driver = cluster.driver
    former = cluster.put(b"k", preferred_nodes=("a",))
    kept = len(driver.log)
    a, b = cluster.nodes["a"], cluster.nodes["b"]
    granted = driver.start([b"x"], 1000, preferred_nodes=("b",))
    offset = next(row[2] for row in grant_rows(granted))
    b.group_size = 0
    b.sealed[offset] = (1000, granted.generations[0], Name("t", b"k"), RESERVED_ROW)
    if not is_there:
        a.sealed.clear()
    cluster.crash(len(driver.log) - kept, nodes=False)
    order = (a, b) if first == "a" else (b, a)
    for node in order:
        node.recover(driver, node.mount(driver))
        check_invariants(driver.catalog)
    driver.pass_time(SETTINGS.tick_ms)
    assert cluster.keys() == [b"k"]
    generation = former if is_there else granted.generations[0]
    slot = driver.catalog.state.tenants.find("t").complete[b"k"]  # type: ignore[union-attr]
    assert driver.catalog.state.table.generation[slot] == generation
    assert not driver.catalog.state.unrecorded.open
    cluster.crash(0)
    assert cluster.keys() == [b"k"]
    assert bool(b.sealed) is not is_there, "what does not count is unsealed"


@pytest.mark.parametrize("wiped", [False, True])
def test_f64_what_waits_for_other_parts_is_asked_for_again_by_the_next_master(wiped: bool) -> None:
    cluster = Cluster("a", "b")
    driver, keys = cluster.driver, [b"g0", b"g1", b"g2", b"g3"]
    grouped(cluster, keys)
    a, b = cluster.nodes["a"], cluster.nodes["b"]
    if wiped:
        cluster.forget()
    else:
        cluster.crash(2, nodes=False)  # of all grants and commits there is no record
    a.recover(driver, a.mount(driver))
    assert cluster.keys() == []
    cluster.crash(0, nodes=False, foreign_until_ms=driver.now_ms + SETTINGS.recovery_ms)
    a.recover(driver, a.mount(driver))
    b.recover(driver, b.mount(driver))
    assert cluster.keys() == keys
    cluster.remove(b"g2")
    cluster.crash(0)
    assert cluster.keys() == []


@pytest.mark.parametrize("missing", [False, True])
def test_f64_a_group_comes_back_as_a_whole_or_not_at_all(missing: bool) -> None:
    """Its members may be parts of one object: some of them alone would be wrong bytes."""
    cluster = Cluster("a", "b")
    driver, keys = cluster.driver, [b"g0", b"g1", b"g2", b"g3"]
    grouped(cluster, keys)
    a, b = cluster.nodes["a"], cluster.nodes["b"]
    cluster.forget()
    a.recover(driver, a.mount(driver))
    assert cluster.keys() == []  # not before all are there
    check_invariants(driver.catalog)
    held = dict(a.sealed)
    for i in range(4):
        cluster.put(b"meanwhile%d" % i, preferred_nodes=("a",))
    assert held.items() <= a.sealed.items()  # what waits was not written over
    assert {cluster.driver.remove([b"meanwhile%d" % i], force=True).removed for i in range(4)} == {
        1
    }
    for name in [at for at in a.sealed if at not in held]:
        del a.sealed[name]
    if missing:
        b.sealed.popitem()
    b.recover(driver, b.mount(driver))
    assert cluster.keys() == ([] if missing else keys)
    check_invariants(driver.catalog)
    if not missing:
        cluster.remove(b"g2")
        assert cluster.keys() == []  # one fate


def test_f64_clusters_lost_while_clocks_go_back_leave_nothing_that_looks_younger() -> None:
    """The database is deleted again and again by a clock that stands still, and in between the
    master is killed before anything it acknowledged is in its log."""
    cluster = Cluster("a", "b")
    first = cluster.term
    stored: list[bytes] = []
    for life in range(4):
        for i in range(3):
            stored.append(b"life%d/%d" % (life, i))
            cluster.put(stored[-1])
        if life % 2:  # killed: of its last puts the log has nothing
            cluster.crash(len(cluster.driver.log) - cluster.durable)
        else:
            cluster.forget(term=first)
            cluster.return_all()
        assert cluster.keys() == sorted(stored)
        cluster.durable = len(cluster.driver.log)
    generations = [cluster.put(b"after%d" % i) for i in range(2)]
    held = [each[1] for node in cluster.nodes.values() for each in node.sealed.values()]
    assert sorted(held)[-2:] == generations


def test_f64_a_mount_of_younger_extents_waits_for_a_term_that_is_durable() -> None:
    cluster = Cluster("a", "b")
    cluster.put(b"k", replica_count=2)
    cluster.driver.log.clear()
    until = cluster.driver.now_ms + SETTINGS.recovery_ms
    cluster.begin(Catalog(SETTINGS), foreign_until_ms=until, term=cluster.term)
    node = cluster.nodes["a"]
    node.foreign = True
    before = len(cluster.driver.log)
    for _ in range(2):  # for as long as the term is not raised
        applied = cluster.driver.apply(node.command())
        assert isinstance(applied.reply, Refused)
        assert applied.reply.code == Backpressure.code
        assert applied.term_wanted == node.term + 1
        assert len(cluster.driver.log) == before
        assert not cluster.driver.catalog.state.members.by_id


def test_a12_a_recorded_copy_does_not_bring_back_what_was_removed() -> None:
    """Its own generation is between those of puts; a record tells of it, so it is no gap."""
    cluster = Cluster("a", "b")
    generation = cluster.put(b"x")
    driver, nodes = cluster.driver, cluster.nodes.values()
    here = {each.segment_id for each in nodes if each.sealed}
    to = next(each for each in nodes if each.segment_id not in here)
    driver.apply(CopyObjects("t", [b"x"], to.name))
    who = (to.name, to.incarnation, to.segment_id)
    tasks = driver.apply(Tasks(*who, (), 8)).reply
    assert isinstance(tasks, TaskList)
    for task in tasks.copies:
        name = Name("t", b"x", generation=generation)
        to.sealed[task.offset] = (task.length, task.generation, name, 0)
    driver.apply(Tasks(*who, [(each.generation, 0) for each in tasks.copies]))
    cluster.put(b"y")
    driver.apply(Remove("t", [b"x"], True))  # recorded; the nodes have not heard of it
    cluster.crash(0)
    assert cluster.keys() == [b"y"]
