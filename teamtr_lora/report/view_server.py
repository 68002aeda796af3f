"""`view`: a local page about the runs in a folder, live while they train. It only reads, and only answers GET.

Who may read: on loopback whoever is on this machine, as long as the browser means this machine (the Host header says so: a page
elsewhere that resolves its own name to 127.0.0.1 is refused). Anywhere else, whoever has the token in the printed address.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.trust import is_loopback
from teamtr_lora.report.page import as_json, comparison, html_page, plotly_script, run_content, utf8
from teamtr_lora.report.run_data import RunData
from teamtr_lora.report.sample import groups_of
from teamtr_lora.runs.follow import RowFollower
from teamtr_lora.runs.standing import RunStanding, find_runs, last_changes, standing
from teamtr_lora.runs.stored_run import StoredRun, read_run
from teamtr_lora.runs.transcripts import read_transcripts, transcript_files

LIST_SECONDS = 1.0  # several readers share one look at the folder
Query = dict[str, list[str]]


class _Followed:
    """A run that somebody looks at: its rows are read once, and what they make of a page is kept until there are more."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name, self._rows, self._lock = path, name, RowFollower(path), threading.Lock()
        self._stored: StoredRun | None = None
        self._data: RunData | None = None
        self._content: dict[str, Any] | None = None

    def data(self) -> RunData:
        with self._lock:
            if self._rows.look() or self._data is None:
                self._stored = read_run(self._path)  # a resumed or swapped run has another recipe
                self._data, self._content = RunData(self._name, self._stored, list(self._rows.rows)), None
            return self._data

    def content(self) -> dict[str, Any]:
        self.data()
        with self._lock:
            if self._content is None:
                assert self._data is not None
                heads = [asdict(file) for file in transcript_files(self._path)]
                self._content = run_content(self._data) | {"transcripts": {"files": heads, "updates": len(heads)}}
            return self._content


class RunsFolder:
    """The runs in a folder, as the page asks for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._followed: dict[str, _Followed] = {}
        self._lines: dict[str, tuple[Any, RunStanding]] = {}
        self._paths: tuple[float, dict[str, Path]] = (0.0, {})
        self._lock = threading.Lock()

    def answer(self, what: str, query: Query) -> dict[str, Any]:
        """KeyError for a question that is none, UserError for a run that cannot be told (yet)."""
        return {"runs": self._runs, "run": self._run, "compare": self._compare, "transcripts": self._transcripts}[what](query)

    def _runs(self, query: Query) -> dict[str, Any]:
        lines = [self._line(name, path) for name, path in self._named().items()]
        lines.sort(key=lambda line: -line.changed)
        return {"folder": str(self.folder), "runs": [asdict(line) for line in lines]}

    def _run(self, query: Query) -> dict[str, Any]:
        name = query["name"][0]
        line = self._line(name, self._path(name))
        found: dict[str, Any] = {"state": asdict(line), "run": None}
        try:
            followed = self._follow(name)
            if str(len(followed.data().rows)) != query.get("rows", [""])[0]:
                found["run"] = followed.content()
        except UserError as error:  # nothing is logged yet, or what is logged is damaged
            found["state"]["problem"] = str(error)
        return found

    def _compare(self, query: Query) -> dict[str, Any]:
        followed = [self._follow(name) for name in query["name"]]
        return {"comparison": comparison([each.data() for each in followed]), "runs": [each.content() for each in followed]}

    def _transcripts(self, query: Query) -> dict[str, Any]:
        path, name = self._path(query["name"][0]), query["file"][0]
        if name not in {file.name for file in transcript_files(path)}:
            raise KeyError(name)
        return {"groups": groups_of(read_transcripts(path, name))}

    def _follow(self, name: str) -> _Followed:
        path = self._path(name)
        with self._lock:
            return self._followed.setdefault(name, _Followed(path, name))

    def _path(self, name: str) -> Path:
        if name not in self._named():
            raise UserError(f"there is no run {name!r} in {self.folder}")
        return self._named()[name]

    def _named(self) -> dict[str, Path]:
        looked, paths = self._paths
        if time.monotonic() - looked > LIST_SECONDS:
            found = find_runs(self.folder) if self.folder.is_dir() else []
            paths = {run_name(self.folder, path): path for path in found}
            self._paths = (time.monotonic(), paths)
        return paths

    def _line(self, name: str, path: Path) -> RunStanding:
        """A run that does not train is looked at again when one of its files has changed."""
        mark = last_changes(path)
        known = self._lines.get(name)
        if known is None or known[0] != mark or known[1].state in ("training", "starting", "stopped"):
            self._lines[name] = known = (mark, standing(path, name))
        return known[1]


def run_name(folder: Path, run: Path) -> str:
    """What a run below a folder is called."""
    return run.resolve().name if run == folder else run.relative_to(folder).as_posix()


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 30
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "teamtr-lora", ""

    def do_GET(self) -> None:  # noqa: N802
        url = urlsplit(self.path)
        refusal = self._refusal(parse_qs(url.query))
        if refusal:
            self._send(403, "text/plain; charset=utf-8", refusal.encode())
        elif url.path == "/":
            self._send(200, "text/html; charset=utf-8", self.server.page)
        elif url.path == "/plotly.js":
            self._send(200, "text/javascript; charset=utf-8", self.server.plotly, keep=True)
        elif url.path.startswith("/api/"):
            self._answer(url.path.removeprefix("/api/"), parse_qs(url.query))
        else:
            self._send(404, "text/plain; charset=utf-8", b"not found")

    def _refuse_method(self) -> None:
        self.close_connection = True
        self._send(405, "text/plain; charset=utf-8", b"this page only reads: GET", allow="GET")

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_HEAD = _refuse_method  # noqa: N815

    def _answer(self, what: str, query: Query) -> None:
        status, found = 200, {}
        try:
            found = self.server.runs.answer(what, query)
        except KeyError as error:
            status, found = 404, {"error": f"there is no {error.args[0]}"}
        except UserError as error:  # which the page shows; as a status of its own it would be an error on the browser's console
            found = {"error": str(error)}
        self._send(status, "application/json; charset=utf-8", utf8(as_json(found)))

    def _refusal(self, query: Query) -> str:
        token = self.server.token
        if token is None:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
            return "" if is_loopback(host) else "this page is for this machine alone: open it as localhost"
        given = self.headers.get("X-Token") or (query.get("token") or [""])[0]
        public = urlsplit(self.path).path == "/plotly.js"  # the same for everybody
        known = public or hmac.compare_digest(given.encode(), token.encode())
        return "" if known else "the token is missing: open the printed address"

    def _send(self, status: int, kind: str, body: bytes, *, keep: bool = False, allow: str = "") -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "max-age=3600" if keep else "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        for name, value in headers.items() | ({("Allow", allow)} if allow else set()):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line every two seconds says nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path, host: str, port: int) -> None:
        self.runs = RunsFolder(folder)
        self.token = None if is_loopback(host) else secrets.token_urlsafe(24)
        self.page, self.plotly = html_page("runs", {"mode": "view"}), utf8(plotly_script())
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise UserError(f"--port {port}: cannot listen on {host} ({error.strerror}); choose another with --port") from error

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader who has closed the page is no error of ours; anything else is."""
        import sys

        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def open_server(folder: Path, host: str, port: int) -> tuple[ThreadingHTTPServer, str]:
    """A server to call `serve_forever` of, and the address to open. Port 0 takes a free one."""
    server = _Server(folder, host, port)
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{server.server_address[1]}/"
    return server, f"{address}?token={server.token}" if server.token else address


def serve(folder: Path, host: str, port: int, tell: Callable[[str], None]) -> None:
    """Until it is interrupted. `tell` gets the address."""
    server, address = open_server(folder, host, port)
    tell(address)
    with server:
        server.serve_forever()
