"""A model hub on this machine: the routes that huggingface_hub calls to create, fill, list and read a repository.

Repositories are lists of commits, so that a test can count them. Large files live under another host name, as on the real hub,
where no token may follow. `break_at` makes a route fail in the ways that networks do.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import unquote

ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
REPO = r"([\w.-]+/[\w.-]+)"
Way = Literal["status", "drop", "truncate", "pause"]


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def is_large(path: str) -> bool:
    return path.endswith(".safetensors")


@dataclass
class Commit:
    oid: str
    files: dict[str, bytes]
    title: str = ""


@dataclass
class Repo:
    private: bool = False
    branches: dict[str, list[Commit]] = field(default_factory=dict)

    def commits(self, revision: str) -> list[Commit] | None:
        if revision in self.branches:
            return self.branches[revision]
        for line in self.branches.values():
            for position, commit in enumerate(line):
                if commit.oid == revision:
                    return line[: position + 1]
        return None


@dataclass
class Break:
    """One way in which requests that match fail, `times` times."""

    pattern: str  # of "METHOD path"
    way: Way = "status"
    status: int = 500
    times: int = 1
    after: bool = False  # the hub does it, and the answer is lost
    keep: int = 0  # bytes of a truncated body
    shorten: bool = False  # the truncated body says that it is whole
    forget: bool = False  # after a pause nothing is done: the client is gone
    on_reached: Callable[[], Any] | None = None
    reached: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)


class FakeHub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, Repo] = {}
        self.large: dict[str, bytes] = {}  # by SHA-256, whether a commit names them or not
        self.users: dict[str, str] = {}  # token -> user; a user writes under its own name
        self.asked: list[str] = []  # "METHOD path"
        self.sent: list[tuple[str, str, int]] = []  # phase, file, bytes of its GETs
        self.phase = ""
        self.storage_saw_token = False
        self.lists_sizes = True  # when it is asked to
        self.echo_token = False  # a careless hub: sends back what it was sent
        self.broken: list[Break] = []
        self.lock = threading.RLock()
        self.made = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def storage(self) -> str:
        return f"http://localhost:{self.server_address[1]}/storage"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news; anything else is a mistake here."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def break_at(self, pattern: str, way: Way = "status", **how: Any) -> Break:
        self.broken.append(Break(pattern, way, **how))
        return self.broken[-1]

    def new_oid(self) -> str:
        self.made += 1
        return hashlib.sha1(str(self.made).encode()).hexdigest()

    def add(self, name: str, files: Mapping[str, bytes], *, branch: str = "main", private: bool = False, title: str = "") -> str:
        """A commit that arrived by other means; `files` is all that the repository then holds."""
        with self.lock:
            repo = self.repos.setdefault(name, Repo(private))
            commit = Commit(self.new_oid(), dict(files), title)
            repo.branches.setdefault(branch, []).append(commit)
            self.large |= {hashlib.sha256(data).hexdigest(): data for path, data in commit.files.items() if is_large(path)}
            return commit.oid

    def name_of(self, oid: str) -> str:
        """Some path under which a commit has this large file."""
        commits = [commit for repo in self.repos.values() for line in repo.branches.values() for commit in line]
        return next((path for c in commits for path, data in c.files.items() if data is self.large[oid]), oid)

    def commits(self, name: str, branch: str = "main") -> list[Commit]:
        """Without the one that creating a repository makes."""
        repo = self.repos.get(name)
        return [c for c in repo.branches.get(branch, []) if c.title != "initial commit"] if repo else []

    def files(self, name: str, branch: str = "main") -> dict[str, bytes]:
        return self.repos[name].branches[branch][-1].files


@contextmanager
def running_hub() -> Iterator[FakeHub]:
    server = FakeHub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        for broken in server.broken:
            broken.release.set()
        server.shutdown()
        server.server_close()


class RefusedError(Exception):
    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer in one piece: the client would wait for the second

    def log_message(self, *_: object) -> None:
        pass

    # --- one request

    def serve(self) -> None:
        self.path, _, query = self.path.partition("?")
        self.lists_sizes = "blobs" in query and self.server.lists_sizes
        body, hub = self.read_body(), self.server
        with hub.lock:
            hub.asked.append(f"{self.command} {self.path}")
            broken = next((b for b in hub.broken if b.times > 0 and re.search(b.pattern, hub.asked[-1])), None)
            if broken:
                broken.times -= 1
        self.cut = broken if broken and broken.way == "truncate" else None
        if broken and broken.way == "pause":
            if broken.on_reached:
                broken.on_reached()
            broken.reached.set()
            broken.release.wait(30)
            if broken.forget:
                self.close_connection = True
                return
        elif self.cut:
            pass
        elif broken and not broken.after:
            self.fail(broken)
            return
        try:
            with hub.lock:
                answer = self.route(body)
        except RefusedError as refusal:
            headers = {"X-Error-Code": refusal.code} if refusal.code else {}
            headers |= {"X-Error-Message": refusal.message} if refusal.message else {}
            answer = (refusal.status, json.dumps({"error": refusal.message}).encode(), headers)
        if broken and broken.after:
            self.fail(broken)
        else:
            self.answer(*answer)

    do_HEAD = do_GET = do_POST = do_PUT = serve

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def fail(self, broken: Break) -> None:
        if broken.on_reached:
            broken.on_reached()
        broken.reached.set()
        if broken.way == "drop":
            self.close_connection = True
            self.connection.close()
        else:
            word = self.headers.get("Authorization", "") if self.server.echo_token else ""
            self.answer(broken.status, json.dumps({"error": f"the hub has a bad day {word}"}).encode(), {})

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        sent = body if self.cut is None else body[: self.cut.keep]
        length = len(sent if self.cut and self.cut.shorten else body)
        self.send_response(status)
        for key, value in {"Content-Length": str(length), "Content-Type": "application/json", **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(sent)
        self.close_connection |= len(sent) < length

    # --- routes

    def route(self, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        routes = [
            (r"POST /api/repos/create", self.create),
            (r"POST /api/validate-yaml", lambda _: {"errors": [], "warnings": []}),
            (rf"GET /api/models/{REPO}(?:/revision/([^/]+))?", self.info),
            (rf"GET /api/models/{REPO}/tree/([^/]+)", self.tree),
            (rf"POST /api/models/{REPO}/branch/([^/]+)", self.branch),
            (rf"POST /api/models/{REPO}/preupload/([^/]+)", self.preupload),
            (rf"POST /{REPO}\.git/info/lfs/objects/batch", self.batch),
            (r"PUT /storage/(\w{64})", self.store),
            (r"POST /verify/(\w{64})", self.verify),
            (rf"POST /api/models/{REPO}/commit/([^/]+)", self.commit),
            (rf"(?:HEAD|GET) /{REPO}/resolve/([^/]+)/(.+)", self.resolve),
            (r"(?:HEAD|GET) /storage/(\w{64})", self.stored),
        ]
        for pattern, run in routes:
            if match := re.fullmatch(pattern, f"{self.command} {self.path}"):
                found = run(body, *(unquote(word) if word else word for word in match.groups()))
                return found if isinstance(found, tuple) else (200, json.dumps(found).encode(), {})
        raise RefusedError(404, message="no such route")

    def user(self) -> str | None:
        word = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if word and word not in self.server.users:
            raise RefusedError(401, message="Invalid credentials in Authorization header")
        return self.server.users.get(word)

    def repo(self, name: str, *, write: bool = False) -> Repo:
        user, repo = self.user(), self.server.repos.get(name)
        if user is None and (write or repo is None or repo.private):
            raise RefusedError(401, message="Invalid username or password.")
        if repo is None or (repo.private and name.split("/")[0] != user):
            raise RefusedError(404, "RepoNotFound", "Repository not found")
        if write and name.split("/")[0] != user:
            raise RefusedError(403, message="You don't have the rights to write here")
        return repo

    def line(self, name: str, revision: str | None, *, write: bool = False) -> list[Commit]:
        found = self.repo(name, write=write).commits(revision or "main")
        if not found:
            raise RefusedError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return found

    def create(self, body: bytes) -> Any:
        asked, user = json.loads(body), self.user()
        name = f"{asked.get('organization') or user}/{asked['name']}"
        if user is None:
            raise RefusedError(401, message="Invalid username or password.")
        if name.split("/")[0] != user:
            raise RefusedError(403, message="You don't have the rights to create a model under this namespace")
        if name in self.server.repos:
            return (
                409,
                json.dumps({"error": "You already created this model repo", "url": f"{self.server.address}/{name}"}).encode(),
                {},
            )
        private = asked.get("visibility") == "private" or asked.get("private") is True
        self.server.add(name, {".gitattributes": ATTRIBUTES}, private=private, title="initial commit")
        return {"url": f"{self.server.address}/{name}", "name": name}

    def info(self, _: bytes, name: str, revision: str | None) -> Any:
        commit = self.line(name, revision)[-1]
        siblings: list[dict[str, Any]] = [{"rfilename": path} for path in sorted(commit.files)]
        for sibling in siblings if self.lists_sizes else []:
            sibling |= described(commit.files[sibling["rfilename"]], sibling["rfilename"])
            sibling["blobId"] = sibling.pop("oid")
        return {"id": name, "sha": commit.oid, "private": self.server.repos[name].private, "siblings": siblings}

    def tree(self, _: bytes, name: str, revision: str) -> Any:
        files = self.line(name, revision)[-1].files
        return [{"type": "file", "path": path, **described(data, path)} for path, data in sorted(files.items())]

    def branch(self, body: bytes, name: str, branch: str) -> Any:
        repo = self.repo(name, write=True)
        if branch in repo.branches:
            raise RefusedError(409, message="Reference already exists")
        repo.branches[branch] = list(self.line(name, json.loads(body or b"{}").get("startingPoint")))
        return {}

    def preupload(self, body: bytes, name: str, revision: str) -> Any:
        files, found = self.line(name, revision, write=True)[-1].files, []
        for asked in json.loads(body)["files"]:
            path, mode = asked["path"], "lfs" if is_large(asked["path"]) else "regular"
            ignored = any(fnmatch(path, line) for line in files.get(".gitignore", b"").decode().split())
            row = {"path": path, "uploadMode": mode, "shouldIgnore": ignored}
            if path in files:
                row["oid"] = hashlib.sha256(files[path]).hexdigest() if mode == "lfs" else git_oid(files[path])
            found.append(row)
        return {"files": found}

    def batch(self, body: bytes, name: str) -> Any:
        self.repo(name, write=True)
        objects = []
        for asked in json.loads(body)["objects"]:
            row = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.server.large:
                upload, verify = f"{self.server.storage}/{asked['oid']}", f"{self.server.address}/verify/{asked['oid']}"
                row["actions"] = {"upload": {"href": upload}, "verify": {"href": verify}}
            objects.append(row)
        return {"transfer": "basic", "objects": objects}

    def store(self, body: bytes, oid: str) -> Any:
        self.server.storage_saw_token |= "Authorization" in self.headers
        if hashlib.sha256(body).hexdigest() != oid:
            raise RefusedError(400, message="the bytes are not those of the name")
        self.server.large[oid] = body
        return {}

    def verify(self, body: bytes, oid: str) -> Any:
        if len(self.server.large.get(oid, b"")) != json.loads(body)["size"]:
            raise RefusedError(404, message="not uploaded")
        return {}

    def commit(self, body: bytes, name: str, revision: str) -> Any:
        line = self.line(name, revision, write=True)
        if revision not in self.server.repos[name].branches:
            raise RefusedError(400, message="a commit goes to a branch")
        header, *operations = [json.loads(row) for row in body.splitlines()]
        if header["value"].get("parentCommit", line[-1].oid) != line[-1].oid:
            raise RefusedError(412, message="A commit has happened since. Please refresh and try again.")
        files = dict(line[-1].files)
        for operation in operations:
            value, kind = operation["value"], operation["key"]
            if kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                if value["oid"] not in self.server.large:
                    raise RefusedError(400, message="LFS pointer pointed to a file that does not exist")
                files[value["path"]] = self.server.large[value["oid"]]
            elif kind == "deletedFile":
                if files.pop(value["path"], None) is None:
                    raise RefusedError(404, "EntryNotFound", "A file with this name doesn't exist")
            else:
                raise RefusedError(400, message=f"unknown operation {kind}")
        line.append(Commit(self.server.new_oid(), files, header["value"]["summary"]))
        address = f"{self.server.address}/{name}/commit/{line[-1].oid}"
        return {"commitOid": line[-1].oid, "commitUrl": address, "success": True}

    def resolve(self, _: bytes, name: str, revision: str, path: str) -> tuple[int, bytes, dict[str, str]]:
        commit = self.line(name, revision)[-1]
        if path not in commit.files:
            raise RefusedError(404, "EntryNotFound", "Entry not found")
        data, headers = commit.files[path], {"X-Repo-Commit": commit.oid}
        if is_large(path):
            oid = hashlib.sha256(data).hexdigest()
            linked = {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(data)), "Location": f"{self.server.storage}/{oid}"}
            return 302, b"", headers | linked
        return self.part(data, headers | {"ETag": f'"{git_oid(data)}"'}, path)

    def stored(self, _: bytes, oid: str) -> tuple[int, bytes, dict[str, str]]:
        self.server.storage_saw_token |= "Authorization" in self.headers
        if oid not in self.server.large:
            raise RefusedError(404, message="no such object")
        return self.part(self.server.large[oid], {"ETag": f'"{oid}"'}, self.server.name_of(oid))

    def part(self, data: bytes, headers: dict[str, str], name: str) -> tuple[int, bytes, dict[str, str]]:
        status, size = 200, len(data)
        if span := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(span[1]), min(int(span[2] or size - 1), size - 1)
            status, data, headers = 206, data[start : end + 1], headers | {"Content-Range": f"bytes {start}-{end}/{size}"}
        if self.command == "GET":
            self.server.sent.append((self.server.phase, name, len(data)))
        return status, data, headers | {"Accept-Ranges": "bytes"}


def described(data: bytes, path: str) -> dict[str, Any]:
    row: dict[str, Any] = {"size": len(data), "oid": git_oid(data)}
    if is_large(path):
        row["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
        row["lfs"]["pointerSize"] = 134
    return row
