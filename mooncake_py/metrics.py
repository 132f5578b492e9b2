"""Counters of a process, and the HTTP endpoint that shows them to Prometheus.

A counter is a cell that one thread adds to (`cell.value += 1`); reading it from another thread
gives a recent value. That is all the hot path pays. Names, labels and help are put to the cells
when somebody asks. `/metrics` answers in Prometheus' text format, `/health` 200 or 503.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

log = logging.getLogger(__name__)

_REQUEST_SECONDS = 5.0  # a scraper that says nothing is cut off after this


class Cell:
    """One number of one thread."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0


class Metrics(Collector):
    """All numbers of a process. Cells are made at start; gauges are asked at every scrape."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._counters: dict[str, tuple[str, tuple[str, ...], dict[tuple[str, ...], Cell]]] = {}
        self._sources: dict[str, Callable[[], Mapping[str, float]]] = {}
        self._collectors: dict[str, Callable[[], Iterable[Metric]]] = {}

    def counter(self, name: str, text: str, **labels: str) -> Cell:
        """The cell of a counter with these labels, made at the first call."""
        _, _, cells = self._counters.setdefault(name, (text, tuple(labels), {}))
        return cells.setdefault(tuple(labels.values()), Cell())

    def source(self, what: str, read: Callable[[], Mapping[str, float]]) -> None:
        """`read()` gives more numbers at every scrape, by `name` or `name.part`; a name that ends
        in `_total` is a counter. A former source of the same `what` is replaced."""
        self._sources[what] = read

    def collector(self, what: str, collect: Callable[[], Iterable[Metric]]) -> None:
        """`collect()` gives whole families, with their full names, at every scrape. A former
        collector of the same `what` is replaced."""
        self._collectors[what] = collect

    def values(self) -> dict[str, float]:
        """Every counter summed over its labels, by name."""
        return {
            name: sum(cell.value for cell in list(cells.values()))
            for name, (_, _, cells) in list(self._counters.items())
        }

    def collect(self) -> Iterable[Metric]:
        for name, (text, labels, cells) in list(self._counters.items()):
            family = CounterMetricFamily(f"{self._prefix}_{name}", text, labels=labels)
            for values, cell in list(cells.items()):
                family.add_metric(values, cell.value)
            yield family
        for read in list(self._sources.values()):
            for name, value in read().items():
                what, _, part = name.partition(".")
                label = {"part": part} if part else {}
                kind = CounterMetricFamily if what.endswith("_total") else GaugeMetricFamily
                gauge: Metric = kind(f"{self._prefix}_{what}", what.replace("_", " "))
                gauge.add_sample(gauge.name + ("_total" * (gauge.type == "counter")), label, value)
                yield gauge
        for collect in list(self._collectors.values()):
            yield from collect()


class MetricsServer:
    """HTTP on its own threads. `healthy` is called at every `/health`.

    OSError: the address cannot be listened on.
    """

    def __init__(
        self,
        address: tuple[str, int],
        metrics: Metrics,
        healthy: Callable[[], bool],
        pages: Mapping[str, Callable[[], str]] | None = None,
    ) -> None:
        """pages: texts under further paths, made when somebody asks."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(metrics)

        class Handler(BaseHTTPRequestHandler):
            timeout = _REQUEST_SECONDS

            def do_GET(self) -> None:
                if self.path.partition("?")[0] == "/metrics":
                    self._answer(200, CONTENT_TYPE_LATEST, generate_latest(registry))
                elif self.path == "/health":
                    good = healthy()
                    self._answer(200 if good else 503, "text/plain", b"ok" if good else b"bad")
                elif pages is not None and self.path in pages:
                    self._answer(200, "text/plain", pages[self.path]().encode())
                else:
                    self._answer(404, "text/plain", b"there are /metrics and /health")

            def _answer(self, code: int, kind: str, body: bytes) -> None:
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Scrapes are no events."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128  # else a few connections that say nothing keep others out

            def handle_error(self, request: object, client_address: object) -> None:
                """A peer that hangs up is no event either."""
                log.debug("a request for metrics ended early", exc_info=True)

            address_family = AF_INET6 if ":" in address[0] else AF_INET

        self._server = Server(address, Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="mooncake-metrics", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
