"""A Hub over loopback, with the part of the real one's interface that loading a model takes: revisions, files, and its ways to refuse."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote

# What the real one answers, by its own name for the reason.
_REFUSALS = {"RepoNotFound": 401, "GatedRepo": 403, "RevisionNotFound": 404, "EntryNotFound": 404}


@dataclass
class Hub:
    """A running Hub. folders: the files of each repository; refs: its branches and tags, to commits; gated: those that refuse.

    is_read_only: whether writing is refused. made, pushed: the datasets that were made, and the files of their commits.
    """

    url: str
    folders: dict[str, Path] = field(default_factory=dict)
    refs: dict[str, dict[str, str]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    is_read_only: bool = False
    made: list[dict[str, Any]] = field(default_factory=list)
    pushed: dict[str, bytes] = field(default_factory=dict)

    def add(self, repository: str, folder: Path, **refs: str) -> None:
        """Publish a folder; each ref is a commit's 40 digits."""
        self.folders[repository], self.refs[repository] = folder, refs


@contextmanager
def serving() -> Iterator[Hub]:
    """A Hub for as long as the context lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(is_head=False)

        def do_HEAD(self) -> None:
            self._answer(is_head=True)

        def do_POST(self) -> None:
            """A dataset made, and files committed to it."""
            path = unquote(self.path.split("?")[0])
            body = self.rfile.read(int(self.headers["Content-Length"]))
            hub.asked.append(f"POST {path}")
            if not self.headers.get("Authorization"):
                self._refuse("RepoNotFound")
            elif hub.is_read_only:
                self._refuse("GatedRepo")
            elif path == "/api/repos/create":
                made = json.loads(body)
                hub.made.append(made)
                self._send_json({"url": f"{hub.url}/datasets/{made['organization']}/{made['name']}"})
            elif path == "/api/validate-yaml":
                self._send_json({"errors": [], "warnings": []})
            elif path.endswith("/preupload/main"):
                files = json.loads(body)["files"]
                self._send_json({"files": [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]})
            elif path.endswith("/commit/main"):
                lines = [json.loads(line) for line in body.splitlines()]
                files = [line["value"] for line in lines if line["key"] == "file"]
                hub.pushed |= {file["path"]: base64.b64decode(file["content"]) for file in files}
                repository = path.removeprefix("/api/").removesuffix("/commit/main")
                self._send_json({"success": True, "commitUrl": f"{hub.url}/{repository}/commit/{'c' * 40}", "commitOid": "c" * 40})
            else:
                self._refuse("EntryNotFound")

        def log_message(self, *args: object) -> None:
            pass

        def _answer(self, is_head: bool) -> None:
            path = unquote(self.path.split("?")[0])
            hub.asked.append(f"{self.command} {path}")
            if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+)(/.+)?)?", path):
                repository, kind, ref = found[1], found[2], found[3] or "main"
                commit = self._commit(repository, ref)
                if commit is None:
                    return
                names = sorted(path.name for path in hub.folders[repository].iterdir())
                if found[4]:
                    # A folder below; no repository here has one.
                    self._refuse("EntryNotFound")
                    return
                if kind == "tree":
                    folder = hub.folders[repository]
                    body = [{"type": "file", "path": name, "size": (folder / name).stat().st_size, "oid": "0" * 40} for name in names]
                    self._send(json.dumps(body).encode(), {"Content-Type": "application/json"}, is_head)
                    return
                body = {"id": repository, "modelId": repository, "sha": commit, "siblings": [{"rfilename": name} for name in names]}
                self._send(json.dumps(body).encode(), {"Content-Type": "application/json"}, is_head)
            elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                repository, ref, name = found.groups()
                commit = self._commit(repository, ref)
                if commit is None:
                    return
                file = hub.folders[repository] / name
                if not file.is_file():
                    self._refuse("EntryNotFound", {"X-Repo-Commit": commit})
                    return
                data = file.read_bytes()
                self._send(data, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}, is_head)
            else:
                self._refuse("RepoNotFound")

        def _commit(self, repository: str, ref: str) -> str | None:
            if repository not in hub.folders:
                self._refuse("RepoNotFound")
            elif repository in hub.gated:
                self._refuse("GatedRepo")
            else:
                refs = hub.refs[repository]
                commit = ref if ref in refs.values() else refs.get(ref)
                if commit is None:
                    self._refuse("RevisionNotFound")
                return commit
            return None

        def _refuse(self, code: str, headers: dict[str, str] | None = None) -> None:
            self.send_response(_REFUSALS[code])
            for name, value in {"X-Error-Code": code, "X-Error-Message": code, "Content-Length": "0", **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()

        def _send_json(self, body: Any) -> None:
            self._send(json.dumps(body).encode(), {"Content-Type": "application/json"}, is_head=False)

        def _send(self, data: bytes, headers: dict[str, str], is_head: bool) -> None:
            self.send_response(200)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if not is_head:
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
