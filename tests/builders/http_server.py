"""A server of files over HTTP/1.1 with ranges, on this machine, that counts what it does and fails as it is told.

`python -m builders.http_server FOLDER` serves a folder from a process of its own: it prints its URL, and what it has
counted for each line of its input, see `obey`; it ends when its input does.
"""

import argparse
import contextlib
import email.utils
import hashlib
import json
import select
import socket
import ssl
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from builders.http_faults import Answer, Fault, Request, size_of
from builders.paths import DATA

# For localhost, 127.0.0.1 and models.example, valid for a hundred years; the certificate is its own authority.
CERTIFICATE = DATA / "localhost.pem"
_MODIFIED = 1_700_000_000.0
_PIECE = 64 << 10


class Server:
    """Serves files until it is left.

    Args:
        content: a folder, or the content of each file by path: ``{"/a.safetensors": b"..."}``.
        etag: "strong", "weak" or None.
        modified: whether answers have Last-Modified.
        ranges: whether it gives ranges.
        latency: seconds before each answer.
        bandwidth: bytes per second of all connections together; None for as many as there can be.
        tls: whether it speaks TLS, by `CERTIFICATE`.
        faults: applied to each answer, in order.

    Attributes:
        files: the content; it may be changed while the server runs.
        requests: that it has seen.
        sent: bytes of bodies.
        most_in_flight: requests at the same time.
        connections: that were made to it.
    """

    tag_length = 16

    def __init__(
        self,
        content: Path | Mapping[str, bytes],
        *,
        etag: str | None = "strong",
        modified: bool = True,
        ranges: bool = True,
        latency: float = 0.0,
        bandwidth: float | None = None,
        tls: bool = False,
        faults: Iterable[Fault] = (),
    ) -> None:
        self.folder = content if isinstance(content, Path) else None
        self.files: dict[str, bytes] = {} if isinstance(content, Path) else dict(content)
        self.etag, self.modified, self.ranges = etag, modified, ranges
        self.latency, self.bandwidth, self.faults = latency, bandwidth, list(faults)
        self.tls = tls
        self.requests: list[Request] = []
        self.sent = self.most_in_flight = self.connections = 0
        self.ended = threading.Event()
        self._lock = threading.Lock()
        self._in_flight = 0
        self._free_at = 0.0
        self._sockets: set[socket.socket] = set()
        handler = type("Handler", (_Handler,), {"owner": self})
        self._server = _Threads(("127.0.0.1", 0), handler)
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(CERTIFICATE)
            self._server.context = context
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    def url(self, path: str = "", host: str = "127.0.0.1", user: str = "") -> str:
        """The URL of a path."""
        return f"{'https' if self.tls else 'http'}://{user}{host}:{self.port}{path}"

    def __enter__(self) -> "Server":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()
        with self._lock:
            sockets = list(self._sockets)
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    # ---- what handlers use ----

    def opened(self, connection: socket.socket) -> None:
        with self._lock:
            self.connections += not isinstance(connection, ssl.SSLSocket)  # whose socket has been counted
            self._sockets.add(connection)

    def closed(self, connection: socket.socket) -> None:
        with self._lock:
            self._sockets.discard(connection)

    def begun(self, request: Request) -> None:
        with self._lock:
            self.requests.append(request)
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)

    def done(self) -> None:
        with self._lock:
            self._in_flight -= 1

    def count(self, sent: int) -> None:
        """Counts bytes that were sent, and waits as long as the bandwidth has it."""
        with self._lock:
            self.sent += sent
            if self.bandwidth is None:
                return
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + sent / self.bandwidth
            wait = self._free_at - now
        self.ended.wait(wait)

    def place_of(self, target: str) -> tuple[str, int]:
        """Host and port of a tunnel, which it makes as a proxy."""
        host, _, port = target.rpartition(":")
        return host, int(port)

    def content(self, path: str) -> Any:
        """The bytes of a file, or its path; None if there is none."""
        name = unquote(urlsplit(path).path)
        if self.folder is None:
            return self.files.get(name)
        place = (self.folder / name.lstrip("/")).resolve()
        return place if place.is_relative_to(self.folder.resolve()) and place.is_file() else None

    def answer(self, request: Request) -> Answer:
        """What a correct server answers."""
        content = self.content(request.path)
        if content is None:
            return Answer(404, {"Content-Length": "9"}, b"not found", 0, 9)
        size, headers = size_of(content), {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        if isinstance(content, Path):
            when, tag = content.stat().st_mtime, f"{size:x}-{content.stat().st_mtime_ns:x}"
        else:
            when, tag = _MODIFIED, hashlib.sha256(content).hexdigest()[: self.tag_length]
        if self.modified:
            headers["Last-Modified"] = email.utils.formatdate(when, usegmt=True)
        if self.etag is not None:
            headers["ETag"] = f'"{tag}"' if self.etag == "strong" else f'W/"{tag}"'
        wanted = request.headers.get("if-match")
        if wanted is not None and wanted != headers.get("ETag"):
            return Answer(412, {"Content-Length": "0", **headers})
        place = request.range if self.ranges else None
        if place is None:
            return Answer(200, {"Content-Length": str(size), **headers}, content, 0, size)
        begin, end = place[0], min(place[1], size)
        if begin >= size:
            return Answer(416, {"Content-Range": f"bytes */{size}", "Content-Length": "0"})
        headers.update({"Content-Range": f"bytes {begin}-{end - 1}/{size}", "Content-Length": str(end - begin)})
        return Answer(206, headers, content, begin, end)


class _Threads(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    context: ssl.SSLContext | None = None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients break off."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: Server
    server: _Threads

    def setup(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.owner.opened(self.request)
        self._plain = self.request
        if self.server.context is not None:  # here, in a thread: a handshake may never end
            try:
                self.request = self.server.context.wrap_socket(self.request, server_side=True)
            except BaseException:  # the client broke off; without `setup` there is no `finish`
                self.owner.closed(self._plain)
                raise
            self.owner.opened(self.request)
        super().setup()

    def finish(self) -> None:
        with contextlib.suppress(OSError):
            super().finish()
        self.owner.closed(self._plain)
        self.owner.closed(self.request)
        self.request.close()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, self.path, headers, time.monotonic())
        self.owner.begun(request)
        try:
            answer = self.owner.answer(request)
            answer.pause = self.owner.latency
            for fault in self.owner.faults:
                fault.apply(answer, request)
            if answer.pause:
                self.owner.ended.wait(answer.pause)
            self._send(answer)
        except OSError:
            self.close_connection = True
        finally:
            self.owner.done()

    def do_HEAD(self) -> None:
        self.do_GET()

    def _send(self, answer: Answer) -> None:
        if answer.raw is not None:
            self.wfile.write(answer.raw)
            self.close_connection = True
            if answer.stalled:
                self.owner.ended.wait(answer.stalled)
            return
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        end = answer.end if answer.most is None else min(answer.end, answer.begin + answer.most)
        self._body(answer.content, answer.begin, end)
        if answer.most is None:
            return
        self.close_connection = True
        if answer.stalled:
            self.owner.ended.wait(answer.stalled)
        if answer.reset:
            self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.request.close()

    def _body(self, content: Any, begin: int, end: int) -> None:
        piece = _PIECE if self.owner.bandwidth is not None else 8 << 20
        if isinstance(content, Path):
            with content.open("rb") as file:
                while begin < end:
                    count = min(piece, end - begin)
                    self.request.sendfile(file, begin, count)
                    begin += count
                    self.owner.count(count)
            return
        view = memoryview(content)
        while begin < end:
            count = min(piece, end - begin)
            self.request.sendall(view[begin : begin + count])
            begin += count
            self.owner.count(count)

    def do_CONNECT(self) -> None:
        """As a proxy: joins the connection with another server."""
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.owner.begun(Request("CONNECT", self.path, headers, time.monotonic()))
        self.owner.done()
        self.close_connection = True
        with socket.create_connection(self.owner.place_of(self.path)) as other:
            self.send_response(200)
            self.end_headers()
            while not self.owner.ended.is_set():
                for ready in select.select([self.request, other], [], [], 0.1)[0]:
                    data = ready.recv(_PIECE)
                    if not data:
                        return
                    (other if ready is self.request else self.request).sendall(data)


def obey(*servers: Server) -> None:
    """Sets the attributes that each line of the input has as JSON, and answers with what was counted since the last."""
    for line in sys.stdin:
        counted = Counter[str]()
        for server in servers:
            for name, value in json.loads(line).items():
                setattr(server, name, value)
            counted.update(sent=server.sent, requests=len(server.requests), connections=server.connections)
            counted["most_in_flight"] = max(counted["most_in_flight"], server.most_in_flight)
            server.sent = server.connections = server.most_in_flight = 0
            server.requests.clear()
        print(json.dumps(counted), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--latency", type=float, default=0.0)
    parser.add_argument("--bandwidth", type=float)
    parser.add_argument("--tls", action="store_true")
    options = parser.parse_args()
    with Server(options.folder, latency=options.latency, bandwidth=options.bandwidth, tls=options.tls) as server:
        print(server.url(), flush=True)
        obey(server)


if __name__ == "__main__":
    main()
