"""The master's log tells what becomes of its nodes, one line a change."""

from __future__ import annotations

import logging

import pytest
from catalog_model import Driver

from mooncake_py.master.commands import Drain, Mount, Mounted, Unmount
from mooncake_py.master.node_log import LEFT, REPLACED, SILENT, NodeLog
from mooncake_py.master.settings import CatalogSettings

KIB = 1024
S = CatalogSettings()


def look(log: NodeLog, driver: Driver, gone: str = SILENT) -> None:
    log.look(driver.catalog.state.members, driver.now_ms, gone)


def test_a_node_that_falls_silent_is_told_from_mount_to_what_was_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "mooncake_py.master.node_log")
    driver, log = Driver(), NodeLog()
    driver.mount("a", 64 * KIB)
    look(log, driver)
    driver.put([b"k", b"l"])
    look(log, driver)
    for ms in (S.suspect_ms, S.dead_ms, S.tick_ms):
        driver.pass_time(ms, alive=False)
        look(log, driver)
        look(log, driver)
    mounted, suspect, lost, forgotten = caplog.messages
    assert mounted.startswith("node a (segment 1) mounted: 65536 bytes at ")
    assert suspect.startswith("node a (segment 1) is suspect: last heard of ")
    assert "is lost: it was silent for too long; " in lost
    assert "; 0 bytes" not in lost
    assert forgotten.endswith("is forgotten; objects with a replica there: 2")


def test_drains_and_leaving_are_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mooncake_py.master.node_log")
    driver, log = Driver(), NodeLog()
    segment_id = driver.mount("a", 64 * KIB)
    look(log, driver)
    for cancel in (False, True):
        driver.apply(Drain("a", cancel=cancel))
        look(log, driver)
        look(log, driver)
    driver.apply(Unmount("a", 1, segment_id))
    look(log, driver, LEFT)
    told = [line.removeprefix("node a (segment 1) ") for line in caplog.messages[1:]]
    assert told == [
        "is draining: it takes nothing new",
        "is drained: nothing is on it",
        "takes new objects again",
        "has left; 0 bytes go with it",
    ]
    assert caplog.records[-1].levelno == logging.INFO, "nothing to worry about"


def test_a_node_that_leaves_its_file_is_away_and_comes_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "mooncake_py.master.node_log")
    driver, log = Driver(), NodeLog()
    mount = Mount("a", 1, "a:1", 1, 64 * KIB, "a", keeps=True)
    for gone in (LEFT, SILENT):
        assert isinstance(driver.apply(mount).reply, Mounted)
        look(log, driver, REPLACED)
        driver.apply(Unmount("a", 1, 1, returns=True))
        look(log, driver, gone)
    told = [line.removeprefix("node a (segment 1) ") for line in caplog.messages[1:]]
    assert told == [away := "is away: its file or disk keeps what it holds", "is back", away]
    levels = [record.levelno for record in caplog.records]
    assert (levels[1], levels[3]) == (logging.INFO, logging.WARNING)


def test_a_node_that_was_started_anew_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mooncake_py.master.node_log")
    driver, log = Driver(), NodeLog()
    driver.mount("a", 64 * KIB)
    look(log, driver)
    driver.now_ms += S.suspect_ms
    driver.mount("a", 64 * KIB, incarnation=2)
    look(log, driver, REPLACED)
    assert "node a (segment 1) is lost: it was started anew" in caplog.messages[1]
    assert "node a (segment 2) mounted" in caplog.messages[2]
