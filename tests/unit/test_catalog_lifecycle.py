"""The picture of an object's life is the table that the catalog acts by."""

from __future__ import annotations

from pathlib import Path

from mooncake_py.master.lifecycle import TABLE, Event, State, Unseal, end, mermaid, promises

NOTE = Path(__file__).parents[2] / "design" / "lifecycle.md"


def test_the_note_shows_the_table_as_it_is() -> None:
    text = NOTE.read_text()
    for part in (mermaid(), promises()):
        assert part in text, f"design/lifecycle.md is old; it must contain:\n{part}"


def test_every_state_is_reached_and_left_and_every_row_is_unique() -> None:
    assert {each.next for each in TABLE} == set(State)
    assert {each.state for each in TABLE} == set(State)
    assert len({(each.state, each.event) for each in TABLE}) == len(TABLE)
    assert {each.event for each in TABLE} == set(Event)


def test_an_acknowledged_removal_is_durable_and_cannot_be_adopted_again() -> None:
    removal = end(State.COMPLETE, Event.REMOVE)
    assert removal.durable
    assert removal.unseal is Unseal.AT_ONCE
