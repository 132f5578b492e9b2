"""A plugin of pytest: the store's own tests, with every byte of an object over RDMA.

    PYTHONPATH=tests/rdma python -m pytest -p over_rdma tests/integration/test_store.py ...

Whatever a test asks for, its clients may use the near port and its nodes the far one, and nothing
else. Of a test that runs once a transport one run is left; those that are about memory which client
and node share do not apply, nor one about memory that vanishes: a device holds the pages it was
given (test_rdma_store.py says what happens instead).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rdma_ports import PORTS, why_not

from mooncake_py import StoreClient
from mooncake_py.ops.cluster import Cluster, ClusterOptions

OF_SHARED_MEMORY = ("f21", "f65", "a46", "a72")
OTHERWISE = ("test_f03_a_memfd_that_became_shorter_is_an_error_and_no_crash",)
OTHER_RUNS = ("[tcp", "-tcp")


def _client(plain: Callable[..., None]) -> Callable[..., None]:
    def over(self: StoreClient, master: str, **options: Any) -> None:
        plain(self, master, **options | {"transports": (f"rdma:{PORTS[0]}",)})

    return over


def _cluster(plain: Callable[..., None]) -> Callable[..., None]:
    def over(self: Cluster, options: ClusterOptions | None = None) -> None:
        given = options or ClusterOptions()
        arguments = [*given.node_arguments, "--transports", f"rdma:{PORTS[1]}"]
        plain(self, replace(given, node_arguments=arguments))

    return over


def pytest_configure() -> None:
    if reason := why_not():
        pytest.exit(f"skipped: {reason}", 0)
    StoreClient.__init__ = _client(StoreClient.__init__)  # type: ignore[method-assign]
    Cluster.__init__ = _cluster(Cluster.__init__)  # type: ignore[method-assign]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if not _applies(item.name)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _applies(name: str) -> bool:
    words = name.split("[", maxsplit=1)[0].split("_")
    if name in OTHERWISE:
        return False
    return not any(run in name for run in OTHER_RUNS) and not set(OF_SHARED_MEMORY) & set(words)
