"""Prefill/decode migration over RDMA: each side a process at one end of the cable.

The tests of hand-overs between processes, with these ways; and that the device carries the pages.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pd_peer import CALL_MS, LAYERS, filled_pool, layout, options_of
from rdma_ports import PORTS
from test_pd_processes import (
    LAYER_BYTES,
    Here,
    Ways,
    here,
    start,
    test_a53_a_dead_receiver_is_found_within_a_second,
    test_a53_a_dead_sender_is_found_within_a_second,
    test_f26_cuts_in_the_middle_of_a_layer_cost_that_layer_at_most,
    test_f26_f67_pages_arrive_layer_by_layer,
    test_f26_pages_are_safe_the_moment_an_abort_returned,
    test_f26_what_arrived_before_a_cut_is_not_sent_again,
    url,
)

from mooncake_py.pd import PrefillInstance, PrefillRank

__all__ = [
    "here",
    "start",
    "test_a53_a_dead_receiver_is_found_within_a_second",
    "test_a53_a_dead_sender_is_found_within_a_second",
    "test_f26_cuts_in_the_middle_of_a_layer_cost_that_layer_at_most",
    "test_f26_f67_pages_arrive_layer_by_layer",
    "test_f26_pages_are_safe_the_moment_an_abort_returned",
    "test_f26_what_arrived_before_a_cut_is_not_sent_again",
    "url",
]

ROOT = Path(__file__).resolve().parents[2]
NEAR = f"rdma:{PORTS[0]}" if PORTS else "rdma"
FAR = f"rdma:{PORTS[1]}" if len(PORTS) > 1 else "rdma"


@pytest.fixture
def ways() -> Ways:
    return FAR, NEAR


def test_f67_a_decoder_goes_on_with_pages_that_the_devices_brought() -> None:
    pytest.importorskip("torch")
    serve = ROOT / "examples" / "serving" / "serve.py"
    done = subprocess.run(
        [sys.executable, str(serve), "split", "--requests", "3", "--hand-over", f"{FAR};{NEAR}"],
        capture_output=True, text=True, timeout=80, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert "3 of 3 answers have the logits of the run without cache" in done.stdout, done.stderr


def test_f67_the_devices_carry_the_pages() -> None:
    decoder = Here(NEAR)
    with decoder.rank, PrefillRank(filled_pool(layout()), options_of(FAR)) as prefill:
        instance = PrefillInstance(layout(), (prefill.address,))
        incoming = decoder.rank.receive(5, [1, 2], instance, timeout_ms=CALL_MS)
        outgoing = prefill.send(5, [8, 9])
        for layer in range(LAYERS):
            outgoing.write_layer(layer, timeout_ms=CALL_MS)
        outgoing.finish(timeout_ms=CALL_MS)
        incoming.wait(timeout_ms=CALL_MS)
        decoder.check([1, 2], [8, 9])
        paths = [path for peer in prefill.engine.describe()["peers"] for path in peer["paths"]]
        assert sum(path["bytes_written"] for path in paths) >= 2 * LAYERS * LAYER_BYTES, paths
