"""The server of `view`: who may read, that it only reads, and that a look is cheap."""

from __future__ import annotations

import http.client
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from made_up_run import make_run, plain_rows

from teamtr_lora.cli import main
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.quantities import short
from teamtr_lora.common.trust import is_loopback
from teamtr_lora.report import view_server
from teamtr_lora.report.view_server import RunsFolder, open_server

Ask = Callable[..., tuple[int, Any]]


@contextmanager
def served(folder: Path, host: str = "127.0.0.1") -> Iterator[tuple[Ask, str]]:
    """A function that asks, and the printed address."""
    server, address = open_server(folder, host, 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()

    def ask(path: str, method: str = "GET", **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, json.loads(body) if body[:1] == b"{" else body

    try:
        yield ask, address
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def folder(bare: Path, tmp_path: Path) -> Path:
    shutil.copytree(bare, tmp_path / "runs" / "one")
    shutil.copytree(bare, tmp_path / "runs" / "study" / "two")
    return tmp_path / "runs"


def test_runs_are_listed_by_their_place_in_the_folder(folder: Path) -> None:
    with served(folder) as (ask, address):
        status, found = ask("/api/runs")
        assert status == 200 and {run["name"] for run in found["runs"]} == {"one", "study/two"}
        assert {run["state"] for run in found["runs"]} == {"finished"} and address.startswith("http://127.0.0.1:")


def test_a_run_is_told_once_and_again_when_it_has_more_rows(folder: Path) -> None:
    log, lines = folder / "one" / "metrics.jsonl", (folder / "one" / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:-2]))
    with served(folder) as (ask, _):
        first = ask("/api/run?name=one")[1]["run"]
        assert first["rows"] == len(lines) - 2
        assert ask(f"/api/run?name=one&rows={first['rows']}")[1]["run"] is None
        with open(log, "ab") as file:
            file.write(lines[-2] + lines[-1][:100])  # a row that is being written is none yet
        assert ask(f"/api/run?name=one&rows={first['rows']}")[1]["run"]["rows"] == len(lines) - 1


def test_a_host_of_another_name_is_refused(folder: Path) -> None:
    """A page that resolves its own name to 127.0.0.1 sends that name."""
    with served(folder) as (ask, _):
        assert ask("/api/runs", Host="evil.example:80")[0] == ask("/", Host="evil.example")[0] == 403
        assert ask("/api/runs", Host="localhost:1")[0] == ask("/api/runs", Host="[::1]:1")[0] == 200


def test_beyond_this_machine_a_token_is_needed(folder: Path) -> None:
    with served(folder, "0.0.0.0") as (ask, address):
        token = address.partition("token=")[2]
        assert len(token) >= 32
        assert ask("/")[0] == ask("/api/runs")[0] == ask("/api/runs", X_Token=token[:-1])[0] == ask("/api/runs?token=")[0] == 403
        assert ask(f"/?token={token}")[0] == ask("/api/runs", X_Token=token)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_it_only_reads(folder: Path, method: str) -> None:
    with served(folder) as (ask, _):
        assert ask("/api/runs", method)[0] == 405


@pytest.mark.parametrize(
    "path",
    ["/api/nothing", "/etc/passwd", "/../x", "/api/run", "/api/transcripts?name=one&file=../metrics",
     "/api/transcripts?name=one&file=/etc/passwd"],
)  # fmt: skip
def test_only_what_the_folder_holds_is_told(folder: Path, path: str) -> None:
    with served(folder) as (ask, _):
        assert ask(path)[0] == 404


@pytest.mark.parametrize("name", ["../one", "/etc", "two"])
def test_a_run_that_is_not_in_the_folder_is_none(folder: Path, name: str) -> None:
    with served(folder) as (ask, _):
        for question in (f"run?name={name}", f"compare?name=one&name={name}", f"transcripts?name={name}&file=x"):
            found = ask(f"/api/{question}")[1]
            assert set(found) == {"error"} and f"there is no run {name!r}" in found["error"]


def test_transcripts_come_as_they_are_asked_for(folder: Path) -> None:
    with served(folder) as (ask, _):
        files = ask("/api/run?name=one")[1]["run"]["transcripts"]["files"]
        groups = ask(f"/api/transcripts?name=one&file={files[0]['name']}")[1]["groups"]
        assert groups and groups[0]["episodes"][0]["messages"][0]["pieces"]


def test_runs_can_be_compared(folder: Path) -> None:
    with served(folder) as (ask, _):
        found = ask("/api/compare?name=one&name=study/two")[1]
        assert len(found["runs"]) == 2 and found["comparison"]["sections"][0]["figures"]


@pytest.mark.parametrize(
    "recipe", ["training: [", "[" * 200_000, "{a: " * 100_000, "training: &a [*a]", "stages: 1", "\x00", "x" * 2**20]
)
def test_a_damaged_run_hides_no_other(folder: Path, recipe: str) -> None:
    """Nor does it end the server: a loader in C goes down by calls, and a recipe can be deeper than its stack."""
    (folder / "one" / "recipe.yaml").write_text(recipe)
    with served(folder) as (ask, _):
        states = {run["name"]: run["state"] for run in ask("/api/runs")[1]["runs"]}
        assert states == {"one": "damaged", "study/two": "finished"}


@pytest.mark.parametrize(
    "spoil",
    [
        {"group": {}},
        {"group": None},
        {"reward": "1"},
        {"messages": [None]},
        {"messages": [{"agent": 1, "text": []}]},
        {"item": []},
    ],
)
def test_a_damaged_transcript_is_one_line(folder: Path, tmp_path: Path, spoil: dict[str, Any], capsys: Any) -> None:
    run = folder / "one"
    file = sorted((run / "episodes").glob("*.jsonl"))[0]
    first, *rest = file.read_text().splitlines()
    file.write_text("\n".join([json.dumps(json.loads(first) | spoil), *rest]))
    assert main(["report", str(run), "--out", str(tmp_path / "r.html")]) == 2
    error = capsys.readouterr().err
    assert f"{file.name}: line 1 is damaged" in error and error.count("\n") == 1
    with served(folder) as (ask, _):
        assert "line 1 is damaged" in ask(f"/api/transcripts?name=one&file={file.stem}")[1]["error"]
        assert ask("/api/runs")[0] == 200


def test_content_is_of_the_newest_rows_whoever_read_them(bare: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Another reader finds a new row between a reader's look at the rows and what it makes of them."""
    run = Path(shutil.copytree(bare, tmp_path / "run", ignore=shutil.ignore_patterns("episodes")))
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:-1]))
    followed, made = view_server._Followed(run, "run"), []
    monkeypatch.setattr(view_server, "run_content", lambda data: made.append(len(data.rows)) or {})
    look = followed.data

    def both() -> Any:
        mine = look()
        (run / "metrics.jsonl").write_bytes(b"".join(lines))
        look()
        return mine

    monkeypatch.setattr(followed, "data", both)
    followed.content()
    assert made == [len(lines)]


def test_hundreds_of_runs_are_listed_again_without_reading_them(bare: Path, tmp_path: Path, monkeypatch: Any) -> None:
    for number in range(120):
        shutil.copytree(bare, tmp_path / f"run-{number}", ignore=shutil.ignore_patterns("episodes"))
    runs, read = RunsFolder(tmp_path), []
    monkeypatch.setattr(view_server, "standing", lambda *args, own=view_server.standing: read.append(1) or own(*args))
    assert len(runs.answer("runs", {})["runs"]) == len(read) == 120
    assert len(runs.answer("runs", {})["runs"]) == len(read) == 120


def test_a_port_that_is_taken_is_said(folder: Path) -> None:
    server, _ = open_server(folder, "127.0.0.1", 0)
    with server, pytest.raises(UserError, match="choose another with --port"):
        open_server(folder, "127.0.0.1", server.server_address[1])


def test_loopback_is_this_machine_alone() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.8.8.8", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "localhost.evil.example", "", "127.0.0.1.nip.io")))


def test_no_name_of_a_run_passes_for_a_line_or_hides_a_part(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "x\nteamtr-lora: all is well [bold]b[/bold]"
    shutil.copytree(folder / "one", folder / name)
    (folder / name / "recipe.yaml").write_text("[")
    assert main(["runs", str(folder)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "all is well" in line]
    assert len(lines) == 2 and all(line.startswith("x\\nteamtr-lora: all is well [bold]b[/bold]") for line in lines)


def test_the_table_in_the_terminal(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["runs", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "one" in said and "finished" in said and "2/2" in said and "%" not in said
    assert main(["runs", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["runs"]
    assert len(found) == 2 and all(f"{run['accuracy_before']:.3f}" in said for run in found), "as train prints it"
    monkeypatch.setenv("COLUMNS", "50")
    assert main(["runs", str(folder)]) == 0
    assert "state finished" in capsys.readouterr().out, "a narrow terminal cuts no word off"
    assert main(["runs", str(make_run(folder.parent / "alone", 3))]) == 0, "a run's own folder is a folder with one run"
    assert "alone" in capsys.readouterr().out


def test_a_folder_with_a_recipe_alone_is_no_run(folder: Path) -> None:
    assert main(["init", str(folder / "mine")]) == 0
    assert {run["name"] for run in RunsFolder(folder).answer("runs", {})["runs"]} == {"one", "study/two"}


def test_a_page_and_the_list_say_the_same_in_the_middle_of_a_stage(tmp_path: Path) -> None:
    made = make_run(tmp_path / "runs" / "one", 5)
    state, run = (RunsFolder(tmp_path / "runs").answer("run", {"name": ["one"]})[key] for key in ("state", "run"))
    shown = {tile["label"]: tile["value"] for tile in run["tiles"]}
    whole, rest = [row for row in plain_rows(made) if row["kind"] == "stage"][-1], plain_rows(made)[-2:]
    assert [row["kind"] for row in rest] == ["update", "update"] and state["counts"]["updates"] == 5
    assert shown["tokens sampled"] == short(whole["sampled_tokens"] + sum(row["sampled_tokens"] for row in rest))
