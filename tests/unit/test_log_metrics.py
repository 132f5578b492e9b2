"""Log lines are lines; counters are what was counted."""

from __future__ import annotations

import logging
import sys
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mooncake_py.log import OneLine
from mooncake_py.metrics import Metrics, MetricsServer


def test_an_event_is_one_line_even_with_a_traceback() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        info = sys.exc_info()
    record = logging.LogRecord("mooncake_py.a.b", logging.ERROR, "", 0, "x\ny", None, info)
    line = OneLine().format(record)
    assert "\n" not in line
    assert " ERROR a.b x\\ny | Traceback" in line
    assert "ValueError: two\\nlines" in line


def test_counters_keep_their_labels_apart() -> None:
    metrics = Metrics("m")
    metrics.counter("calls_total", "Calls", door="a").value += 2
    metrics.counter("calls_total", "Calls", door="b").value += 3
    metrics.counter("calls_total", "Calls", door="a").value += 1
    assert metrics.values() == {"calls_total": 6}


def test_the_endpoint_speaks_prometheus_and_health() -> None:
    metrics = Metrics("m")
    metrics.counter("calls_total", "Calls", door="a").value += 2
    metrics.source("catalog", lambda: {"objects": 5, "evicted_total": 7, "hole.12": 9})
    state = {"good": True}
    server = MetricsServer(("127.0.0.1", 0), metrics, lambda: state["good"])
    base = f"http://127.0.0.1:{server.port}"
    try:
        with urllib.request.urlopen(f"{base}/metrics", timeout=5) as page:
            families = list(text_string_to_metric_families(page.read().decode()))
        samples = {(s.name, *s.labels.values()): s.value for f in families for s in f.samples}
        assert samples == {
            ("m_calls_total", "a"): 2,
            ("m_objects",): 5,
            ("m_evicted_total",): 7,
            ("m_hole", "12"): 9,
        }
        with urllib.request.urlopen(f"{base}/health", timeout=5) as page:
            assert page.status == 200
        state["good"] = False
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{base}/health", timeout=5)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{base}/", timeout=5)
    finally:
        server.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{base}/health", timeout=5)
