"""Where the ranks of prefill instances are: a small directory over HTTP.

    PUT    /v1/instances/NAME/ranks/RANK   {"address": "host:port", "layout": {...}}
    GET    /v1/instances/NAME              {"layout": {...}, "addresses": [...]}, 404 until complete
    GET    /v1/instances                   {"instances": [names of the complete ones]}
    DELETE /v1/instances/NAME              forget it

Usually it runs beside rank 0 of a prefill instance or beside the router. It holds nothing that the
ranks cannot publish again, and no request passes it: a decode rank asks once for each instance. A
rank that publishes again replaces its address; one with another layout replaces the instance.
"""

from __future__ import annotations

import http.client
import json
import re
import threading
import urllib.error
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mooncake_py.clock import Clock, SystemClock
from mooncake_py.errors import MasterUnavailable, MooncakeError, PeerUnreachable, UsageError
from mooncake_py.pd.decode import PrefillInstance
from mooncake_py.pd.layout import KvLayout

BODY_MAX = 64 << 10
INSTANCES_MAX = 10_000
CONNECTIONS_MAX = 256
READ_S = 5.0  # a request that does not arrive in time is dropped
NAME_MAX = 200
_PATH = re.compile(r"/v1/instances(?:/([^/]{1,2400})(?:/ranks/(\d{1,6}))?)?")
_POLL_S = 0.05


class _Instances:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, tuple[KvLayout, dict[int, str]]] = {}

    def publish(self, name: str, rank: int, given: dict[str, Any]) -> None:
        layout = KvLayout.from_json(given.get("layout"))
        address = given.get("address")
        if not isinstance(address, str) or ":" not in address or len(address) > 512:
            raise UsageError("an address is host:port", got=address)
        if layout.rank != rank:
            raise UsageError("the layout is of another rank", layout=layout.rank, rank=rank)
        layout = layout.of_rank(0)
        with self._lock:
            known = self._known.get(name)
            if known is None and len(self._known) >= INSTANCES_MAX:
                raise UsageError("too many instances", most=INSTANCES_MAX)
            if known is None or known[0] != layout:
                self._known[name] = known = (layout, {})
            known[1][rank] = address

    def forget(self, name: str) -> None:
        with self._lock:
            self._known.pop(name, None)

    def complete(self) -> list[str]:
        with self._lock:
            return sorted(n for n, (lay, at) in self._known.items() if len(at) == lay.rank_count)

    def get(self, name: str) -> dict[str, Any] | None:
        with self._lock:
            layout, addresses = self._known.get(name, (None, {}))
            if layout is None or len(addresses) != layout.rank_count:
                return None
            in_order = [addresses[rank] for rank in range(layout.rank_count)]
        return {"layout": layout.to_json(), "addresses": in_order}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, where: tuple[str, int], instances: _Instances) -> None:
        self.instances = instances
        self._room = threading.BoundedSemaphore(CONNECTIONS_MAX)
        super().__init__(where, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)  # its sender tries again
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away in the middle is nobody's error."""


class _Handler(BaseHTTPRequestHandler):
    timeout = READ_S
    server: _Server

    def do_GET(self) -> None:
        name, rank = self._path()
        if name is None and rank is None:
            return self._answer(200, {"instances": self.server.instances.complete()})
        found = self.server.instances.get(name or "") if rank is None else None
        if found is None:
            return self._answer(404, {"error": "no complete instance of this name"})
        return self._answer(200, found)

    def do_PUT(self) -> None:
        name, rank = self._path()
        if name is None or rank is None:
            return self._answer(404, {"error": "PUT /v1/instances/NAME/ranks/RANK"})
        try:
            self.server.instances.publish(name, rank, self._body())
        except MooncakeError as error:
            return self._answer(400, {"error": str(error)})
        return self._answer(200, {})

    def do_DELETE(self) -> None:
        name, rank = self._path()
        if name is None or rank is not None:
            return self._answer(404, {"error": "DELETE /v1/instances/NAME"})
        self.server.instances.forget(name)
        return self._answer(200, {})

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: one comes for each new pair of instances."""

    def _path(self) -> tuple[str | None, int | None]:
        found = _PATH.fullmatch(self.path)
        if found is None:
            return "", -1
        name = None if found[1] is None else urllib.parse.unquote(found[1])
        if name is not None and len(name) > NAME_MAX:
            return "", -1
        return name, None if found[2] is None else int(found[2])

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > BODY_MAX:
            raise UsageError("a body with its length", most=BODY_MAX)
        try:
            given = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise UsageError(f"the body is no JSON: {error}") from error
        if not isinstance(given, dict):
            raise UsageError("the body is no JSON object")
        return given

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        payload = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


class Bootstrap:
    """The server; `url` is what ranks are given. Raises UsageError when it cannot listen."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        try:
            self._server = _Server((host, port), _Instances())
        except OSError as error:
            raise UsageError(f"cannot listen: {error}", host=host, port=port) from error
        self.url = f"http://{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(_POLL_S,),
            name="mooncake-bootstrap",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Twice is fine."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Bootstrap:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def publish_rank(url: str, name: str, layout: KvLayout, address: str, *, timeout_ms: int) -> None:
    """Tell the bootstrap where this prefill rank is. UsageError, PeerUnreachable."""
    body = {"address": address, "layout": layout.to_json()}
    _call("PUT", f"{_instance(url, name)}/ranks/{layout.rank}", body, timeout_ms)


def find_instance(
    url: str, name: str, *, timeout_ms: int, clock: Clock | None = None
) -> PrefillInstance:
    """All ranks of a prefill instance; waits until every rank has published. PeerUnreachable: the
    bootstrap is not there, or ranks are missing still."""
    clock = clock or SystemClock()
    deadline_ms = clock.now_ms() + timeout_ms
    pause = threading.Event()
    incomplete = False
    while True:
        left_ms = max(1, deadline_ms - clock.now_ms())
        try:
            found = _call("GET", _instance(url, name), None, left_ms)
            layout = KvLayout.from_json(found.get("layout"))
            return PrefillInstance(layout, tuple(found.get("addresses", ())))
        except MasterUnavailable:  # 404: not yet
            incomplete = True
        except PeerUnreachable:  # or only in what was left of the time
            if not incomplete or clock.now_ms() < deadline_ms:
                raise
        if clock.now_ms() >= deadline_ms:
            raise PeerUnreachable("the instance is not complete at the bootstrap", instance=name)
        pause.wait(_POLL_S)


def _instance(url: str, name: str) -> str:
    if not 1 <= len(name) <= NAME_MAX:
        raise UsageError(f"an instance has a name of 1 to {NAME_MAX} characters", name=name[:300])
    return f"{url}/v1/instances/{urllib.parse.quote(name, safe='')}"


def _call(method: str, url: str, body: dict[str, Any] | None, timeout_ms: int) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout_ms / 1000) as answer:
            found = json.loads(answer.read(BODY_MAX * 16))
    except urllib.error.HTTPError as error:
        cause = error.read(BODY_MAX).decode(errors="replace")
        if error.code == 404:
            raise MasterUnavailable(cause, url=url) from error
        raise UsageError(cause, url=url) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise PeerUnreachable(f"the bootstrap did not answer: {error}", url=url) from error
    return found if isinstance(found, dict) else {}
