"""The part of the Kubernetes API that knows one Node: list and watch, over HTTP on the loopback."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit


class NodeApi:
    """Holds the Node ``n1``. ``change`` is seen by all watches; ``refuse`` answers with that status instead,
    ``expire_next`` ends the next watch with an ERROR event, 410."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._events: list[tuple[int, str, dict[str, Any]]] = []
        self._cut = 0
        self.refuse: int | None = None
        self.expire_next = False
        self.lists = 0
        self.watches = 0
        self.selectors: set[str] = set()
        self.change()
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                api._answer(self)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
        self._server.shutdown()
        self._server.server_close()

    def change(self, *taints: str, unschedulable: bool = False, kind: str = "MODIFIED") -> None:
        """Another version of the Node, with these taints."""
        with self._changed:
            version = len(self._events) + 1
            spec: dict[str, Any] = {"taints": [{"key": key, "effect": "NoSchedule"} for key in taints]}
            if unschedulable:
                spec["unschedulable"] = True
            metadata = {"name": "n1", "resourceVersion": str(version)}
            node = {"kind": "Node", "apiVersion": "v1", "metadata": metadata, "spec": spec}
            self._events.append((version, kind, node))
            self._changed.notify_all()

    def cut(self) -> None:
        """End all watches in the middle."""
        with self._changed:
            self._cut += 1
            self._changed.notify_all()

    def wait_for(self, what: str, count: int) -> None:
        """Until there were so many ``lists`` or ``watches``."""
        with self._changed:
            assert self._changed.wait_for(lambda: getattr(self, what) >= count, 20), f"no {count} {what} in 20 s"

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        query = parse_qs(urlsplit(request.path).query)
        self.selectors.add(query.get("fieldSelector", [""])[0])
        is_watch = "watch" in query
        with self._changed:
            self.watches += is_watch
            self.lists += not is_watch
            cut = self._cut
            # With the count, so that whoever has seen this watch can decide about the next one.
            is_expired = is_watch and self.expire_next
            self.expire_next &= not is_watch
            self._changed.notify_all()
        if self.refuse is not None:
            self._send(request, self.refuse, {"kind": "Status", "code": self.refuse, "reason": "refused"})
        elif is_watch:
            self._stream(request, int(query["resourceVersion"][0]), cut, is_expired=is_expired)
        else:
            node = self._events[-1][2]
            metadata = {"resourceVersion": node["metadata"]["resourceVersion"]}
            self._send(request, 200, {"kind": "NodeList", "apiVersion": "v1", "metadata": metadata, "items": [node]})

    def _send(self, request: BaseHTTPRequestHandler, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def _stream(self, request: BaseHTTPRequestHandler, version: int, cut: int, *, is_expired: bool) -> None:
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        if is_expired:
            status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
            self._chunk(request, {"type": "ERROR", "object": status})
            request.wfile.write(b"0\r\n\r\n")
            return
        while True:
            with self._changed:
                while self._cut == cut and len(self._events) == version:
                    self._changed.wait(20)
                if self._cut != cut:
                    request.close_connection = True
                    return
                news = self._events[version:]
            for version, kind, node in news:  # noqa: B007 - the last one is where the next round begins
                self._chunk(request, {"type": kind, "object": node})

    @staticmethod
    def _chunk(request: BaseHTTPRequestHandler, event: dict[str, Any]) -> None:
        data = json.dumps(event).encode() + b"\n"
        request.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        request.wfile.flush()
