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
