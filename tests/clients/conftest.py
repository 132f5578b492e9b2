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
sys.path.insert(2, str(Path(__file__).parents[2] / "compat"))  # the package `mooncake`

ENGINES = ("sglang", "lmcache", "vllm")
ABSENT = [name for name in ENGINES if importlib.util.find_spec(name) is None]
collect_ignore_glob = [f"test_{name}*.py" for name in ABSENT]
if importlib.util.find_spec("torch") is None:
    collect_ignore_glob.append("test_compat_tensors.py")
if "sglang" in ABSENT:  # it needs PyPI, as all that runs beside the engines
    collect_ignore_glob.append("test_compat_package.py")

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
