"""Which device is used is said, and is never chosen in silence (A44); and what happens without."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from mooncake_py._native.memory import address_of
from mooncake_py.errors import PeerUnreachable, UsageError
from mooncake_py.transfer import EngineOptions, Rdma, TransferEngine, make_slices, options_for

ABSENT = Rdma(devices=("no_such_device0",))
MS = 5_000


def test_a44_a_missing_device_ends_the_start_without_device() -> None:
    with pytest.raises(UsageError, match=r"no RDMA here: .* Remedy: make `ibv_devices`"):
        TransferEngine(EngineOptions(transports=("rdma",), rdma=ABSENT))


def test_f22_a44_tcp_stands_in_where_allowed_and_says_why_without_device(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        options = EngineOptions(listen="127.0.0.1:0", transports=("rdma", "tcp"), rdma=ABSENT)
        with TransferEngine(options) as far, TransferEngine(options) as near:
            assert "rdma is not used, tcp is" in caplog.text
            described = near.describe()["rdma"]
            assert described["state"] == "off"
            assert described["reason"]
            source, target = np.arange(5000, dtype=np.uint8), np.zeros(5000, np.uint8)
            region = far.register(source)
            peer = near.open(far.address, timeout_ms=MS)
            assert peer.transport == "tcp"
            slices = make_slices(1)
            slices["region"], slices["length"] = region.id, source.size
            slices["local"] = address_of(target)[0]
            near.read(peer, slices, timeout_ms=MS)
            assert np.array_equal(source, target)


def test_a44_two_engines_without_a_common_way_say_so_without_device() -> None:
    with (
        TransferEngine(EngineOptions(listen="127.0.0.1:0", transports=("tcp",))) as far,
        TransferEngine(EngineOptions(transports=("shm",))) as near,
        pytest.raises(PeerUnreachable, match="no common transport"),
    ):
        near.open(far.address, timeout_ms=MS)


def test_a_peer_without_a_common_way_for_bytes_can_be_told_things_without_device() -> None:
    """A master without a device has to reach nodes that have RDMA alone."""
    with (
        TransferEngine(EngineOptions(listen="127.0.0.1:0", transports=("shm",))) as far,
        TransferEngine(EngineOptions(transports=("tcp", "messages"))) as near,
    ):
        region = far.register(np.arange(5000, dtype=np.uint8))
        peer = near.open(far.address, timeout_ms=MS)
        assert peer.transport == "messages"
        peer.send(7, b"hello", timeout_ms=MS)
        message = far.inbox.receive(MS)
        assert message is not None
        assert (message.kind, bytes(message.payload)) == (7, b"hello")
        slices = make_slices(1)
        slices["region"], slices["length"] = region.id, 100
        slices["local"] = address_of(np.zeros(100, np.uint8))[0]
        for transfer in (near.read, near.write):
            with pytest.raises(PeerUnreachable, match="messages alone"):
                transfer(peer, slices, timeout_ms=MS)
        peer.send(7, b"again", timeout_ms=MS)
        assert far.inbox.receive(MS) is not None


def test_users_name_devices_behind_the_transport_without_device() -> None:
    options = options_for(("shm", "rdma:mlx5_0:1+mlx5_1", "tcp"))
    assert options.transports == ("shm", "rdma", "tcp")
    assert options.rdma.devices == ("mlx5_0:1", "mlx5_1")
    assert options_for(("rdma",)).rdma.devices == ()


@pytest.mark.parametrize("rdma", [Rdma(traffic_class=256), Rdma(rails_max=0)])
def test_settings_out_of_bounds_are_refused_without_device(rdma: Rdma) -> None:
    with pytest.raises(UsageError):
        TransferEngine(EngineOptions(transports=("tcp",), rdma=rdma))
