"""`plan` on a hub id, against a hub of our own on this machine: what is fetched and what is not."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

REPO, COMMIT = "org/tiny", "0123456789abcdef0123456789abcdef01234567"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
HEADER_READ = 100_001  # what huggingface_hub asks for at first: most headers fit into it
RECIPE = """
base: {source: org/tiny, device: cpu}
team: {agents: [{name: planner, lora: {rank: 2}}]}
task: {name: column_sum, digits: 1}
rollout: {items_per_stage: 8, episodes_per_item: 2, max_message_tokens: 3}
"""
# One process, as the client reads its endpoint at import: plan, fetch everything, plan without a hub.
SCRIPT = """
import json, sys, urllib.request
from teamtr_lora.base.load import base_facts
from teamtr_lora.base.source import describe, resolve
from teamtr_lora.recipe import load_recipe
from teamtr_lora.training.plan import make_plan

recipe, endpoint = load_recipe(sys.argv[1]), sys.argv[2]
mark = lambda name: urllib.request.urlopen(f"{endpoint}/mark/{name}").read()
planned = make_plan(recipe).as_dict()
folder, stored = describe("org/tiny")
files = [p.name for p in folder.glob("*.safetensors")]
mark("full")
whole = resolve("org/tiny")
mark("cached")
again = make_plan(recipe).as_dict()
print(json.dumps({"plan": planned["parameters"], "again": again["parameters"], "stored": [stored.size, stored.dtypes],
    "files": files, "facts": [base_facts(whole).stored.size]}))
"""


class FakeHub(ThreadingHTTPServer):
    """The few routes that a download needs, over the files of one folder; remembers what each file's GETs sent."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.phase = folder, "plan"
        self.sent: list[tuple[str, str, int]] = []  # phase, file, bytes

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:  # noqa: N802
        self.do_GET()

    def do_GET(self) -> None:  # noqa: N802
        path = self.path.partition("?")[0]
        files = sorted(self.server.folder.iterdir())
        if path.startswith("/mark/"):
            self.server.phase = path.rpartition("/")[2]
            self._answer(b"{}")
        elif re.fullmatch(rf"/api/models/{REPO}(/revision/\w+)?", path):
            siblings = [{"rfilename": f.name, "size": f.stat().st_size, "blobId": f.name} for f in files]
            self._answer(json.dumps({"id": REPO, "sha": COMMIT, "siblings": siblings}).encode())
        elif re.fullmatch(rf"/api/models/{REPO}/tree/\w+", path):
            tree = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": f.name} for f in files]
            self._answer(json.dumps(tree).encode())
        elif match := re.fullmatch(rf"/{REPO}/resolve/\w+/([\w.-]+)", path):
            self._file(self.server.folder / match[1])
        else:
            self._answer(b"not found", status=404)

    def _file(self, file: Path) -> None:
        if not file.is_file():
            self._answer(b"", status=404, headers={"X-Error-Code": "EntryNotFound"})
            return
        data, headers = file.read_bytes(), {"ETag": f'"{file.name}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if span := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(span[1]), min(int(span[2] or len(data) - 1), len(data) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
            self._answer(data[start : end + 1], status=206, headers=headers, name=file.name)
        else:
            self._answer(data, headers=headers, name=file.name)

    def _answer(self, body: bytes, *, status: int = 200, headers: dict[str, str] | None = None, name: str = "") -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), "Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
            self.server.sent += [(self.server.phase, name, len(body))] if name else []


@pytest.fixture
def repository(tiny_base: Path, tmp_path: Path) -> Path:
    """The tiny base in two shards, both larger than what may be read of them."""
    folder = tmp_path / "repository"
    folder.mkdir()
    for file in tiny_base.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    weights = load_file(tiny_base / "model.safetensors")
    names = sorted(weights)
    parts = {SHARDS[0]: names[: len(names) // 2], SHARDS[1]: names[len(names) // 2 :]}
    for shard, chosen in parts.items():
        save_file({name: weights[name] for name in chosen}, folder / shard, metadata={"format": "pt"})
        assert (folder / shard).stat().st_size > HEADER_READ
    weight_map = {name: shard for shard, chosen in parts.items() for name in chosen}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.fixture
def hub(repository: Path) -> Iterator[FakeHub]:
    server = FakeHub(repository)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def environment(tmp_path: Path, endpoint: str) -> dict[str, str]:
    local = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    return os.environ | local | {"HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


def test_plan_reads_headers_only_and_uses_what_is_here(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "recipe.yaml"), hub.address]
    done = subprocess.run(command, env=environment(tmp_path, hub.address), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    sizes = {shard: (hub.folder / shard).stat().st_size for shard in SHARDS}
    assert said["files"] == [], "no weights came"
    assert said["stored"] == [sum(sizes.values()), ["F32"]] and said["facts"] == [sum(sizes.values())]
    assert said["plan"] == said["again"] > 0
    planned = {(name, size) for phase, name, size in hub.sent if phase == "plan"}
    assert {name for name, _ in planned} >= {"config.json", "tokenizer.json", *SHARDS}
    assert all(size <= HEADER_READ < sizes[name] for name, size in planned if name in SHARDS)
    assert not any(name.endswith(".py") for _, name, _ in hub.sent)
    assert {name for phase, name, size in hub.sent if phase == "full" and size == sizes.get(name)} == set(SHARDS)
    assert not [name for phase, name, _ in hub.sent if phase == "cached"], "a base that is here was fetched again"


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    command = [sys.executable, "-m", "teamtr_lora.cli", "plan", str(tmp_path / "recipe.yaml")]
    done = subprocess.run(command, env=environment(tmp_path, "http://127.0.0.1:9"), capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line]
    assert len(lines) == 1 and "org/tiny" in lines[0] and "hub could not be read" in lines[0], done.stderr
