"""A local stand-in for the Hugging Face Hub that serves downloads."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class LocalHub:
    """Repositories by name, each a directory, and the received requests by method and path."""

    repositories: dict[str, Path]
    gated: set[str] = field(default_factory=set)
    requests: list[tuple[str, str]] = field(default_factory=list)
    endpoint: str = ""

    def files_sent(self) -> set[str]:
        matches = (_FILE.fullmatch(path) for method, path in self.requests if method == "GET")
        return {match[3] for match in matches if match}


@contextmanager
def serve(hub: LocalHub) -> Iterator[LocalHub]:
    """Answer at ``hub.endpoint`` until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, with_body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path))
            status, headers, body = _response(hub, path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _response(hub: LocalHub, path: str) -> tuple[int, dict[str, str], bytes]:
    api, file = _API.fullmatch(path), _FILE.fullmatch(path)
    match = api or file
    directory = hub.repositories.get(match[1]) if match else None
    if match is None or directory is None:
        return 401, {"X-Error-Code": "RepoNotFound"}, b"{}"  # the Hub hides private ones
    if (api[3] if api else file[2]) not in (None, "main", COMMIT):
        return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
    if api:
        return 200, {"Content-Type": "application/json"}, _listing(match[1], directory, api[2])
    if match[1] in hub.gated:
        return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
    target = directory / file[3]
    if not target.is_file():
        return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
    body = target.read_bytes()
    return 200, {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": COMMIT}, body


def _listing(name: str, directory: Path, kind: str | None) -> bytes:
    files = sorted(path for path in directory.iterdir() if path.is_file())
    if kind == "tree":
        answer: object = [
            {
                "type": "file",
                "path": path.name,
                "size": path.stat().st_size,
                "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
            }
            for path in files
        ]
    else:
        siblings = [{"rfilename": path.name} for path in files]
        answer = {"id": name, "sha": COMMIT, "siblings": siblings, "private": False}
    return json.dumps(answer).encode()
