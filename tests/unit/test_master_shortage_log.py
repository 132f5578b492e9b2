"""Puts that find no room are told of, and not too often."""

from __future__ import annotations

import logging

import pytest
from catalog_model import Driver

from mooncake_py.master.service import Cluster, Service
from mooncake_py.master.settings import CatalogSettings
from mooncake_py.master.shortage_log import PERIOD_MS
from mooncake_py.wire import answers, lane


def test_a15_a_put_without_room_is_logged_with_what_there_is_once_an_interval(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = CatalogSettings(objects_max=1 << 12, suspect_ms=1 << 20, dead_ms=1 << 21)
    driver = Driver(settings)
    service = Service(driver.catalog, Cluster("c", b"s" * 16, 1, 250))
    driver.mount("a", 1 << 20)
    driver.put([b"pinned"], 300_000, hard_pin=True)
    policy = answers.PutAsk("t", answers.ReplicaPolicy(), "")

    def ask(key: bytes, nbytes: int) -> None:
        request = answers.put_start_request(policy, [key], [nbytes], ())
        service.handle(lane.PUT_START, request.SerializeToString(), driver.now_ms)

    with caplog.at_level(logging.WARNING):
        ask(b"fits", 100_000)
        assert caplog.messages == []
        for i in range(5):
            ask(b"large %d" % i, 900_000)
        (line,) = caplog.messages
        assert "an object of 900000 bytes" in line
        free = driver.catalog.state.members.placeable[0].allocator.free * 64
        assert f"{free} bytes are free" in line
        assert "1 objects found none" in line
        driver.now_ms += PERIOD_MS
        ask(b"large", 900_001)
        assert "900001 bytes" in caplog.messages[1]
        assert "5 objects found none" in caplog.messages[1]
