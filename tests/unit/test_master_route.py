"""Which master a client turns to."""

from __future__ import annotations

import pytest

from mooncake_py.errors import UsageError
from mooncake_py.master.route import Route


def test_a26_a_hint_is_followed_even_to_an_address_that_was_not_given() -> None:
    route = Route("a:1, b:2,[::1]:3")
    first = route.current
    assert route.turn(first, "b:2")
    assert route.current.address == "b:2"
    assert route.turn(route.current, "elsewhere:9")
    assert route.current.address == "elsewhere:9"
    assert route.turn(route.current), "from there back to the list"
    assert route.current is first
    route.close()


def test_a26_without_a_hint_the_next_of_the_list_is_asked() -> None:
    route = Route("a:1,b:2")
    seen = []
    for _ in range(3):
        seen.append(route.current.address)
        assert route.turn(route.current, seen[-1]), "a hint at itself is none"
    assert seen == ["a:1", "b:2", "a:1"]
    route.close()


def test_a26_only_the_first_of_many_threads_turns() -> None:
    route = Route("a:1,b:2")
    first = route.current
    assert route.turn(first)
    assert route.turn(first), "somebody else has turned: ask the current one"
    assert route.current.address == "b:2"
    route.close()


def test_with_one_address_there_is_nowhere_to_turn_to() -> None:
    route = Route("a:1")
    assert not route.several
    assert not route.turn(route.current)
    assert not route.turn(route.current, "no address")
    route.close()


@pytest.mark.parametrize("text", ["", "a:1,", "a:1,b", "a"])
def test_what_names_no_master_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Route(text)


def test_f12_who_is_told_by_etcd_is_asked_next_also_when_it_is_the_same_again() -> None:
    said = ["a:1", "", "b:2"]
    route = Route("a:1", lambda: said.pop(0))
    first = route.current
    assert route.several
    for _ in range(2):
        assert route.turn(first), "nobody else leads yet: look again"
        assert route.current is first
    assert route.turn(first)
    assert route.current.address == "b:2"
    assert route.turn(route.current, "a:1"), "a master's word does as well"
    assert route.current is first
    route.close()
