"""The engines' own code over a live cluster. Needs `./dev clients`; skipped elsewhere."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_py.ops.cluster import Cluster, ClusterOptions

sys.path.insert(0, str(Path(__file__).parent))  # helpers beside the tests, by name
sys.path.insert(1, str(Path(__file__).parent.parent / "integration"))

HAS_SGLANG = importlib.util.find_spec("sglang") is not None
collect_ignore_glob = [] if HAS_SGLANG else ["test_sglang_*.py"]

SEGMENT_BYTES = 96 << 20
OPTIONS = ClusterOptions(node_count=2, segment_bytes=SEGMENT_BYTES)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(OPTIONS) as running:
        yield running


@pytest.fixture
def fresh_cluster() -> Iterator[Cluster]:
    with Cluster(OPTIONS) as running:
        yield running
