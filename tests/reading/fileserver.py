"""A file server on this machine whose answers can be made to fail in the ways that servers and networks do."""

import http.server
import re
import socket
import struct
import threading
from collections import defaultdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

HOLD_S = 60.0


class FileServer:
    """Serves a folder over HTTP on 127.0.0.1, at a port of its own, with Range requests (RFC 9110).

    faults: by a file's name, what happens to its next requests, one entry each, None for nothing:
      ("cut", n)      n bytes of the body are sent, then the connection is closed
      ("reset", n)    the same, but it is reset
      ("hold", n)     n bytes are sent, then none until `released` is set; `held` is set meanwhile
      ("status", c)   answers with the code c alone
      ("to", url)     redirects
      ("range", text) answers 206 with this Content-Range, and the whole file
      ("endless",)    sends the file without saying how long it is
    requests: the name and the Range header of each request so far.
    """

    def __init__(self, folder: Path, *, ranges: bool = True) -> None:
        self.folder = folder
        self.ranges = ranges
        self.faults: dict[str, list[Any]] = defaultdict(list)
        self.requests: list[tuple[str, str | None]] = []
        self.held, self.released = threading.Event(), threading.Event()
        outer = self

        class Handler(_Handler):
            server_of_files = outer

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def link(self, name: str) -> str:
        """The link of a file below the folder, signed as those of an object store are."""
        return f"http://127.0.0.1:{self._server.server_port}/{name}?X-Signature=SECRET"

    def ranges_of(self, name: str) -> list[str | None]:
        """The Range headers of the requests for one file."""
        return [given for asked, given in self.requests if asked.endswith(name)]


class _Handler(http.server.BaseHTTPRequestHandler):
    server_of_files: FileServer
    timeout = HOLD_S

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        server = self.server_of_files
        name, given = urlsplit(self.path).path.lstrip("/"), self.headers.get("Range")
        server.requests.append((name, given))
        faults = server.faults[Path(name).name]
        kind, *values = (faults.pop(0) if faults else None) or ("none",)
        path = server.folder / name
        if kind == "status":
            return self.send_error(values[0])
        if kind == "to":
            self.send_response(302)
            self.send_header("Location", values[0])
            return self.end_headers()
        if not path.is_file():
            return self.send_error(404)
        return self._send(path.read_bytes(), given if server.ranges else None, kind, *values)

    def _send(self, data: bytes, given: str | None, kind: str, value: Any = None) -> None:
        start = int(match[1]) if (match := re.fullmatch(r"bytes=(\d+)-", given or "")) else 0
        if given is not None and start >= len(data):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(data)}")
            return self.end_headers()
        is_part = given is not None and kind != "range"
        body = data[start:] if is_part else data
        self.send_response(206 if is_part or kind == "range" else 200)
        if is_part or kind == "range":
            self.send_header("Content-Range", value if kind == "range" else f"bytes {start}-{len(data) - 1}/{len(data)}")
        if kind != "endless":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if kind not in ("cut", "reset", "hold"):
            self.wfile.write(body)
            return None
        self.wfile.write(body[:value])
        self.wfile.flush()
        if kind == "hold":
            self.server_of_files.held.set()
            self.server_of_files.released.wait(HOLD_S)
        if kind == "reset":
            # Closed with data unsent and no time to linger, a socket sends a reset.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        return None
