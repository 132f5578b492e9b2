"""The router of prefill and decode instances."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_py.errors import PeerUnreachable, UsageError
from mooncake_py.pd import Router


def test_a_shared_prefix_goes_where_it_was_computed() -> None:
    router = Router(["p0", "p1"], ["d0", "d1"])
    first = router.route(range(100))
    router.prefilled(first)
    other = router.route(range(1000, 1100))
    assert (first.cached, other.cached) == (0, 0)
    again = router.route([*range(100), 100])
    assert (again.prefill, again.cached) == (first.prefill, 100)


def test_a_long_queue_beats_a_short_prefix() -> None:
    router = Router(["p0", "p1"], ["d0"])
    first = router.route(range(10))
    router.prefilled(first)
    busy = router.route([*range(10), *range(100, 400)])
    assert busy.prefill == first.prefill
    assert router.route(range(10)).prefill != first.prefill


def test_decode_instances_share_the_load() -> None:
    router = Router(["p"], ["d0", "d1", "d2"])
    routes = [router.route([number]) for number in range(30)]
    assert sorted(route.decode for route in routes) == ["d0"] * 10 + ["d1"] * 10 + ["d2"] * 10
    for route in routes:
        if route.decode == "d1":
            router.finished(route)
    assert {router.route([number]).decode for number in range(100, 110)} == {"d1"}


def test_what_left_gets_nothing_and_what_is_missing_is_said() -> None:
    router = Router(["p0"], ["d0"])
    route = router.route(range(5))
    router.leave("p0")
    with pytest.raises(PeerUnreachable, match="join"):
        router.route([1])
    router.join(prefill="p1")
    assert router.route(range(5)).cached == 0
    router.leave("d0")
    router.join(decode="d0")
    router.finished(route)  # of its first life: changes nothing of the second
    assert router.route([1]).decode == "d0"
    with pytest.raises(UsageError):
        Router([], [], pages_max=0)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20), st.booleans()), max_size=60))
def test_loads_return_to_nothing(work: list[tuple[int, int, bool]]) -> None:
    router = Router(["p0", "p1"], ["d0", "d1"], pages_max=16)
    routes = []
    for family, length, ends in work:
        routes.append(router.route([(family, i) for i in range(length)]))
        if ends:
            router.prefilled(routes[-1])
    assert len({route.room for route in routes}) == len(routes)
    for route in [*routes, *routes]:  # twice is fine
        router.finished(route)
    assert all(known.queued == 0 for known in router._prefills.values())
    assert all(len(known.seen) <= 16 for known in router._prefills.values())
    assert set(router._decodes.values()) == {0}
