"""Real processes for the tests of this folder: `cluster` is a master and two nodes.

A test that kills or stops one of them takes `fresh_cluster`, others share one a module.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_py.ops.cluster import Cluster, ClusterOptions

sys.path.insert(0, str(Path(__file__).parent))  # helpers beside the tests, by name

# A runner that was started in the background ignores SIGINT, and its children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

SEGMENT_BYTES = 64 << 20
OPTIONS = ClusterOptions(node_count=2, segment_bytes=SEGMENT_BYTES)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(OPTIONS) as running:
        yield running


@pytest.fixture
def fresh_cluster() -> Iterator[Cluster]:
    with Cluster(OPTIONS) as running:
        yield running
