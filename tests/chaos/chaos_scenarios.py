"""What must happen when one thing breaks, each by itself. `test_partitions.py` runs them, every one
in a process with a network of its own:

    python -m tests.chaos.chaos_scenarios NAME FOLDER
"""

from __future__ import annotations

import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "integration")]

from chaos_faults import flip_byte  # noqa: E402 - its folder has just been added
from chaos_puppet import Puppet  # noqa: E402
from chaos_schedule import STANDBY, Shape  # noqa: E402
from chaos_world import DEAD_MS, LEASE_MS, SUSPECT_MS, World  # noqa: E402

from mooncake_py.errors import MooncakeError  # noqa: E402
from mooncake_py.master.client import MasterClient  # noqa: E402
from mooncake_py.model import EXTENT_HEADER_BYTES  # noqa: E402
from mooncake_py.ops.child import Child  # noqa: E402

WITHIN_MS = 10_000
READ_MS = 1_000  # of a read with another replica, whatever happens to one


class Scene:
    """A world with hosts for puppets, `p0` and `p1`."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        self.stack = ExitStack()
        self.world = self.stack.enter_context(closing(World(shape, 0, folder)))
        for host in ("p0", "p1"):
            self.network.add(host)

    @property
    def network(self):  # type: ignore[no-untyped-def]  # Network; never None here
        assert self.world.network is not None
        return self.world.network

    def puppet(self, host: str, masters: str = "", clock: str = "-") -> Puppet:
        address = masters or self.world.master_address
        puppet = Puppet(self.network.namespace(host), address, clock=clock)
        return self.stack.enter_context(closing(puppet))

    def until(self, condition: Callable[[], object], what: str, within_ms: int = WITHIN_MS) -> int:
        """Milliseconds that it took."""
        began = time.monotonic()
        while not condition():
            took_ms = (time.monotonic() - began) * 1000
            assert took_ms < within_ms, f"{what}: not within {within_ms} ms"
            self.world.poll()
            select.poll().poll(5)
        return int((time.monotonic() - began) * 1000)

    def states(self) -> dict[str, str]:
        try:
            with closing(MasterClient(self.world.master_address)) as master:
                return {s.node: s.state for s in master.status(timeout_ms=1_000).segments}
        except MooncakeError:
            return {}

    def cut(self, a: str, *others: str) -> None:
        for other in others:
            self.network.cut(a, other)

    def heal(self, a: str, *others: str) -> None:
        for other in others:
            self.network.heal(a, other)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


PLAIN = Shape("plain", 1, master_count=2, node_count=2, client_count=0, network=True)


def client_cut_from_node(scene: Scene) -> None:
    near, far = scene.puppet("p0"), scene.puppet("p1")
    for key, nodes in (("both", ["n0", "n1"]), ("only", ["n0"])):
        assert near.ask("put", key, key, nodes) == "ok"
        assert near.ask("get", key) == far.ask("get", key) == key
    scene.cut("p0", "n0")
    times = []
    for _ in range(20):
        near.send("get", "both")
        outcome, took_ms = near.answer()
        assert outcome == "both"
        times.append(took_ms)
    assert max(times) < READ_MS, times
    near.send("get", "only")
    outcome, took_ms = near.answer()
    assert outcome in ("ObjectNotFound", "TransferTimeout"), outcome
    assert took_ms < 3_000 + 1_000
    near.send("put", "while", "while")
    outcome, took_ms = near.answer()
    assert took_ms < 3_000 + 1_000
    scene.heal("p0", "n0")
    took_ms = scene.until(lambda: near.ask("get", "only") == "only", "the object is back")
    say(f"reads while cut: worst {max(times):.0f} ms; a put: {outcome}; back after {took_ms} ms")


def node_cut_from_masters(scene: Scene) -> None:
    client = scene.puppet("p0")
    for key, nodes in (("both", ["n0", "n1"]), ("only", ["n0"])):
        assert client.ask("put", key, key, nodes) == "ok"
    scene.cut("n0", "m0", "m1")
    suspect_ms = scene.until(lambda: scene.states().get("n0") == "suspect", "n0 is suspect", 3_000)
    fresh = scene.puppet("p1")  # has no placement under a lease
    assert fresh.ask("get", "only") == "ObjectNotFound"
    assert fresh.ask("get", "both") == "both"
    for number in range(10):
        assert client.ask("put", f"new{number}", "new", ["n0"]) == "ok"
    scene.heal("n0", "m0", "m1")
    back_ms = scene.until(lambda: fresh.ask("get", "only") == "only", "n0 is back with its objects")
    scene.cut("n0", "m0", "m1")
    scene.until(lambda: "n0" not in scene.states(), "n0 is forgotten", 3 * DEAD_MS)
    assert all(fresh.ask("get", f"new{number}") == "new" for number in range(10))
    scene.heal("n0", "m0", "m1")
    again_ms = scene.until(lambda: scene.states().get("n0") == "alive", "n0 mounts again")
    assert client.ask("put", "again", "again", ["n0"]) == "ok"
    assert fresh.ask("get", "again") == "again"
    say(f"suspect after {suspect_ms} ms, back {back_ms} ms after, when forgotten {again_ms} ms")


def leader_cut_from_etcd(scene: Scene) -> None:
    """It alone: nodes and clients reach it as before."""
    former = scene.world.leader()
    assert former is not None
    other = "m1" if former == "m0" else "m0"
    client = scene.puppet("p0")
    loyal = scene.puppet("p1", scene.world.address(former))
    assert client.ask("put", "before", "before", ["n0", "n1"]) == "ok"
    assert loyal.ask("get", "before") == "before"
    scene.cut(former, scene.world.host("e0"))
    accepted: dict[str, list[float]] = {former: [], other: []}
    number = 0
    masters = {name: MasterClient(scene.world.address(name)) for name in (former, other)}

    def both_tried() -> bool:
        nonlocal number
        for name, master in masters.items():
            number += 1
            began = time.monotonic()
            try:
                keys = [b"race/%d" % number]
                grants = master.put_start("t", keys, [64], timeout_ms=1_000)
                if grants.status.tolist() == [0]:
                    ended = master.put_end("t", keys, grants.generations.tolist(), timeout_ms=1_000)
                    if ended.tolist() == [0]:
                        accepted[name].append(began)
            except MooncakeError:
                continue
        return len(accepted[other]) >= 10

    took_ms = scene.until(both_tried, "the other leads", 15_000)
    for master in masters.values():
        master.close()
    late = [at for at in accepted[former] if at > accepted[other][0]]
    assert late == [], f"{len(late)} writes accepted by the former leader after the new one's first"
    assert client.ask("put", "after", "after", ["n0", "n1"]) == "ok"
    assert client.ask("get", "after") == "after"
    scene.until(
        lambda: loyal.ask("get", "after") in ("NotLeader", "MasterUnavailable"),
        "who asks the former leader only is told so",
        SUSPECT_MS + 3_000,
    )
    assert all(loyal.ask("get", "after") != "ObjectNotFound" for _ in range(10))
    scene.heal(former, scene.world.host("e0"))
    scene.until(lambda: loyal.ask("get", "after") == "after", "the former one says whom to ask")
    say(f"the other leads after {took_ms} ms; {number} writes tried, none accepted by both")


def leader_cut_from_everybody(scene: Scene) -> None:
    former = scene.world.leader()
    assert former is not None
    rest = [host for host in scene.network.hosts if host != former]
    client = scene.puppet("p0")
    assert client.ask("put", "before", "before", ["n0", "n1"]) == "ok"
    scene.cut(former, *rest)
    number = 0

    def written() -> bool:
        nonlocal number
        number += 1
        return client.ask("put", f"after/{number}", "after") == "ok"

    took_ms = scene.until(written, "a write succeeds", 15_000)
    assert scene.puppet("p1").ask("get", "before") == "before"
    scene.heal(former, *rest)
    assert client.ask("get", f"after/{number}") == "after"
    say(f"first write {took_ms} ms after the leader was cut off from everybody")


def starts_without_etcd_and_leader(scene: Scene) -> None:
    """Everything is started while etcd is away, and comes to life by itself when it is back."""
    world = scene.world
    for name in ("m0", "m1", "n0", "e0"):
        world.kill(name)
    for name in ("m0", "m1", "n0"):
        world.start(name)
    waiting = time.monotonic()
    scene.until(lambda: time.monotonic() - waiting > 2.5, "they have tried")
    assert world.casualties() == {}
    world.start("e0")
    took_ms = scene.until(world.all_ready, "all are ready", 20_000)
    client = scene.puppet("p0")
    assert client.ask("put", "k", "v", ["n0", "n1"]) == "ok"
    say(f"all ready {took_ms} ms after etcd was started")


def outage_while_a_standby_is_frozen(scene: Scene) -> None:
    """Nodes that look for a leader elsewhere are kept waiting there, longer than what makes them
    dead. They are not, and reads go on."""
    world = scene.world
    client = scene.puppet("p0")
    for number in range(10):
        assert client.ask("put", f"k{number}", "v", ["n0"] if number % 2 else ["n1"]) == "ok"
    standby = world.resolve(STANDBY)
    assert standby is not None
    world.signal(standby, signal.SIGSTOP)
    world.kill("e0")
    since, reads, failed = time.monotonic(), 0, []

    def over() -> bool:
        nonlocal reads
        outcome = client.ask("get", f"k{reads % 10}")
        reads += 1
        if outcome != "v":
            failed.append(outcome)
        return time.monotonic() - since > 2 * DEAD_MS / 1000

    scene.until(over, "the outage", 3 * DEAD_MS)
    assert "ObjectNotFound" not in failed
    world.start("e0")
    took_ms = scene.until(lambda: client.ask("put", f"after{reads}", "v") == "ok", "a write")
    world.signal(standby, signal.SIGCONT)
    assert [client.ask("get", f"k{number}") for number in range(10)] == ["v"] * 10
    assert took_ms < 5_000
    say(f"{reads} reads, {len(failed)} failed: {failed[:3]}; first write after {took_ms} ms")
    assert len(failed) <= reads // 50


def clocks_that_are_wrong(scene: Scene) -> None:
    """A day ahead or behind, set while running or from the start: nothing depends on it."""
    world = scene.world
    world.set_clock("n0", 86_400)
    world.set_clock("p1", -86_400)
    leader = world.leader()
    assert leader is not None
    other = "m1" if leader == "m0" else "m0"
    ahead = scene.puppet("p0")
    behind = scene.puppet("p1", clock=str(world.clock_file("p1")))
    for number in range(20):
        key = f"k{number}"
        assert ahead.ask("put", key, key, ["n0", "n1"]) == "ok"
        assert behind.ask("get", key) == key
    for seconds in (86_400, -86_400):
        world.set_clock(other, seconds)
        world.kill(other)
        world.start(other)  # this one has had the wrong time from the start
        scene.until(world.all_ready, "the follower is ready", 20_000)
        scene.until(lambda name=other: world.follows(name), "it follows")
        former = world.leader()
        assert former is not None
        world.kill(former)
        world.start(former)
        key = f"after{seconds}"
        took_ms = scene.until(
            lambda key=key: behind.ask("put", key, key) in ("ok", "ObjectExists"), "a write"
        )
        assert all(behind.ask("get", f"k{n}") == f"k{n}" for n in range(20))
        assert ahead.ask("get", key) == key
        assert ahead.ask("remove", key) == "ok"
        assert ahead.ask("get", key) == "ObjectNotFound"
        lease_end = time.monotonic() + LEASE_MS / 1000
        scene.until(lambda end=lease_end: time.monotonic() > end, "leases end")
        assert behind.ask("get", key) == "ObjectNotFound"
        scene.until(world.all_ready, "the former leader follows", 20_000)
        say(f"a leader whose clock is {seconds} s off: first write after {took_ms} ms")
        other = former


def machine_clocks_that_differ(scene: Scene) -> None:
    """A node on a machine that was started at another time: its own monotonic clocks differ."""
    world = scene.world
    world.kill("n0")
    offset = ["--time", "--fork", "--kill-child", "--monotonic=500000", "--boottime=500000"]
    program = [shutil.which("unshare") or "", *offset, sys.executable, "-m"]
    module, arguments = world.command("n0", 1)
    inside = [scene.network.namespace("n0"), "-", *program, module, *arguments]
    with Child("n0-elsewhere", "tests.chaos.chaos_inside", inside, world.folder) as node:
        scene.until(lambda: scene.states().get("n0") == "alive", "the node is alive")
        client = scene.puppet("p0")
        for number in range(20):
            assert client.ask("put", f"k{number}", "v", ["n0"]) == "ok"
            assert client.ask("get", f"k{number}") == "v"
        leader = world.leader()
        assert leader is not None
        world.kill(leader)
        stored = ("ok", "ObjectExists")
        scene.until(lambda: client.ask("put", "after", "v", ["n0"]) in stored, "a write")
        assert all(client.ask("get", f"k{number}") == "v" for number in range(20))
        node.kill()
    say("a node whose machine was started days before: all is as ever, also with a new leader")


def damaged_byte(scene: Scene) -> None:
    world = scene.world
    client, other = scene.puppet("p0"), scene.puppet("p1")
    assert client.ask("put", "both", "both" * 500, ["n0", "n1"]) == "ok"
    assert client.ask("put", "only", "only" * 500, ["n0"]) == "ok"
    with closing(MasterClient(world.master_address)) as master:
        placed = master.locate("default", [b"both", b"only"], timeout_ms=2_000)
    for row in placed.rows:
        if placed.segments[int(row["segment_index"])].node == "n0":
            offset = int(row["offset"]) + EXTENT_HEADER_BYTES + int(row["length"]) // 2
            flip_byte(world.pid("n0"), "n0", offset)
    for puppet in (client, other) * 5:
        assert puppet.ask("get", "both") == "both" * 500
        assert puppet.ask("get", "only") in ("ChecksumMismatch", "ObjectNotFound")
    say("the damaged replica was never handed out; the other one was")


SCENARIOS: dict[str, tuple[Callable[[Scene], None], Shape]] = {
    each.__name__: (each, shape)
    for each, shape in (
        (client_cut_from_node, PLAIN),
        (node_cut_from_masters, PLAIN),
        (leader_cut_from_etcd, PLAIN),
        (leader_cut_from_everybody, PLAIN),
        (starts_without_etcd_and_leader, PLAIN),
        (machine_clocks_that_differ, PLAIN),
        (damaged_byte, PLAIN),
        (outage_while_a_standby_is_frozen, PLAIN),
        (
            clocks_that_are_wrong,
            Shape("clocks", 1, node_count=2, client_count=0, network=True, clocks=True),
        ),
    )
}


def main() -> None:
    name, folder = sys.argv[1:]
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    scenario, shape = SCENARIOS[name]
    scene = Scene(Path(folder), shape)
    with scene.stack:
        scenario(scene)


if __name__ == "__main__":
    main()
