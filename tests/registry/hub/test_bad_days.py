"""push and pull when the hub, the network or this process fails: one commit or none, whole teams or nothing."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from teamtr_lora.cli import main
from teamtr_lora.registry.hub import pull, push
from teamtr_lora.registry.identity import Identity
from teamtr_lora.registry.registry_store import Registry
from teamtr_lora.registry.verify import verify

TOKEN, STRANGER = "hf_aSecretThatNobodyMaySee", "hf_anotherAccount"  # as in conftest.py
REPO = "alice/team"
WEIGHTS = "adapter_model.safetensors"


def test_who_may_not_is_told_in_one_line(
    hub: Any, store: Any, files: Any, said: Any, identity: Identity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = store(tmp_path / "a", identity)
    hub.add("alice/secret", {"README.md": b"x"}, private=True)
    upload = ["push", "pair", "--repo", REPO, "--registry", here.root]
    for token, status in (("", "401"), ("hf_wrong", "401"), (STRANGER, "403")):
        monkeypatch.setenv("HF_TOKEN", token)
        line = said(*upload)
        assert status in line and ("hf auth login" in line and "HF_TOKEN" in line) == (status == "401"), line
        assert hub.repos.keys() == {"alice/secret"}
        line = said("pull", "alice/secret", "--registry", tmp_path / "b")
        assert "hf auth login" in line
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for words in (["alice/nothing"], ["alice/secret", "--revision", "nowhere"]):
        assert "not on the hub" in said("pull", *words, "--registry", tmp_path / "b")
    assert "user/name" in said("pull", "../team", "--registry", tmp_path / "b")
    assert "commands take a team of a folder by its path" in said("pull", tmp_path, "--registry", tmp_path / "b")
    assert files(tmp_path / "b") == {} if (tmp_path / "b").exists() else True
    assert main([str(word) for word in upload]) == 0 and len(hub.commits(REPO)) == 1


STEPS = {
    "look": "GET /api/models", "create": "POST /api/repos/create", "card": "POST /api/validate-yaml",
    "preupload": "preupload", "batch": "lfs/objects/batch", "upload": "PUT /storage", "verify": "POST /verify",
    "commit": "/commit/",
}  # fmt: skip


@pytest.mark.parametrize(("step", "way"), [*((step, "status") for step in STEPS), ("upload", "drop"), ("commit", "drop")])
def test_a_failure_in_the_middle_of_a_push_leaves_no_commit(
    hub: Any,
    store: Any,
    files: Any,
    said: Any,
    identity: Identity,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    waits: list[float],
    step: str,
    way: Any,
) -> None:
    here = store(tmp_path / "a", identity)
    words = ["push", "pair", "--repo", REPO, "--registry", str(here.root)]
    hub.break_at(STEPS[step], way, times=2)
    if step == "look":
        hub.add(REPO, {})
    assert main(words) == 0 and len(hub.commits(REPO)) == (2 if step == "look" else 1), "two failures are waited out"
    assert capsys.readouterr().err == "" and sum(waits) >= 2
    hub.repos.clear(), hub.large.clear(), waits.clear(), hub.asked.clear()
    broken = hub.break_at(STEPS[step], way, times=1000)
    line = said(*words)
    tries = [asked for asked in hub.asked if re.search(STEPS[step], asked)]
    assert REPO in line and "run the command again" in line and hub.commits(REPO) == []
    assert len(tries) <= 12 and waits, "tries are bounded and spaced"
    broken.times = 0
    assert main(words) == 0 and len(hub.commits(REPO)) == 1
    assert pull(REPO, root=tmp_path / "b").status == "new" and files(tmp_path / "b") == files(here.root)


def test_a_hub_without_xet_storage(
    hub: Any, store: Any, said: Any, identity: Identity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the client's Xet library (hf_xet, which writes logs and so stays out of this test) says that there is none."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)

    def xet(**_: Any) -> None:
        raise ConnectionError(
            f"HTTP status client error (404 Not Found), domain: {hub.address}/api/models/x/xet-write-token/main"
        )

    monkeypatch.setattr("huggingface_hub._commit_api._upload_xet_files", xet)
    words = ["push", "pair", "--repo", REPO, "--registry", str(store(tmp_path / "a", identity).root)]
    assert "HF_HUB_DISABLE_XET=1" in said(*words) and hub.commits(REPO) == []
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    assert main(words) == 0 and len(hub.commits(REPO)) == 1


@pytest.mark.parametrize("way", ["status", "drop"])
def test_an_answer_that_is_lost(
    hub: Any, store: Any, swapped: Any, said: Any, identity: Identity, tmp_path: Path, way: Any
) -> None:
    here = store(tmp_path / "a", identity)
    hub.break_at("POST /api/repos/create", way, after=True)
    hub.break_at("/commit/", way, after=True)
    done = push("pair", REPO, root=here.root)
    assert [commit.oid for commit in hub.commits(REPO)] == [done.commit], "the commit arrived, and is not made twice"
    swapped(here, identity, 9)
    hub.break_at("/commit/", way, after=True)
    gone = hub.break_at("GET /api/models", way, times=0)
    hub.broken[-2].on_reached = lambda: setattr(gone, "times", 1000)
    line = said("push", "pair", "--repo", REPO, "--registry", here.root)
    assert "whole or not at all" in line
    hub.broken.clear()
    assert push("pair", REPO, root=here.root).unchanged and len(hub.commits(REPO)) == 2


def test_somebody_elses_commit_in_between_is_kept(
    hub: Any, store: Any, swapped: Any, said: Any, identity: Identity, tmp_path: Path
) -> None:
    here = store(tmp_path / "a", identity)
    push("pair", REPO, root=here.root)
    swapped(here, identity, 9)
    race, words = hub.break_at("preupload", "pause"), ["push", "pair", "--repo", REPO, "--registry", str(here.root)]
    race.on_reached = lambda: hub.add(REPO, {**hub.files(REPO), "notes.md": b"theirs"})
    race.release.set()
    line = said(*words)
    assert "412" in line and "run the command again" in line and len(hub.commits(REPO)) == 2
    assert main(words) == 0 and len(hub.commits(REPO)) == 3 and "notes.md" in hub.files(REPO)


@pytest.mark.parametrize("large", [True, False])
def test_a_truncated_download(
    hub: Any, store: Any, files: Any, said: Any, identity: Identity, tmp_path: Path, large: bool
) -> None:
    here = store(tmp_path / "a", identity)
    push("pair", REPO, root=here.root)
    pattern, root = ("GET /storage" if large else "GET /.*/manifest.json"), tmp_path / "b"
    hub.break_at(pattern, "truncate", keep=100, shorten=True, times=1000)
    line = said("pull", REPO, "--registry", root)
    assert "run the command again" in line and files(root) == {} and Registry(root).teams() == []
    hub.broken.clear()
    hub.break_at(pattern, "truncate", keep=100)  # a connection that breaks once: the client goes on from there
    assert main(["pull", REPO, "--registry", str(root)]) == 0 and files(root) == files(here.root)


@pytest.mark.parametrize("pattern", ["GET /api/models", "(HEAD|GET) /alice", "GET /storage"])
def test_a_failure_in_the_middle_of_a_pull_stores_nothing(
    hub: Any, files: Any, said: Any, pushed: dict[str, bytes], tmp_path: Path, pattern: str
) -> None:
    hub.add(REPO, pushed)
    for way in ("status", "drop"):
        hub.break_at(pattern, way, times=1000)
        line = said("pull", REPO, "--registry", tmp_path / "b")
        assert REPO in line and "run the command again" in line and files(tmp_path / "b") == {}
        hub.broken.clear()
    assert main(["pull", REPO, "--registry", str(tmp_path / "b")]) == 0 and verify(Registry(tmp_path / "b")).problems == []


def test_no_network_and_offline_mode(
    hub: Any, store: Any, said: Any, identity: Identity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = store(tmp_path / "a", identity)
    commands = [["push", "pair", "--repo", REPO, "--registry", here.root], ["pull", REPO, "--registry", tmp_path / "b"]]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for words in commands:
        assert "HF_HUB_OFFLINE" in said(*words)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    for words in commands:
        assert "could not be reached" in said(*words)
    assert hub.asked == []


def killed(hub: Any, pattern: str, words: list[str]) -> None:
    """Runs a command in a process of its own and kills it -9 when the hub gets a request that matches."""
    reached = hub.break_at(pattern, "pause")
    process = multiprocessing.get_context("fork").Process(target=main, args=(words,))
    process.start()
    assert reached.reached.wait(30), "the command never came to this point"
    process.kill()
    process.join()
    reached.way, reached.times = "status", 0
    reached.forget = True
    reached.release.set()


@pytest.mark.parametrize("pattern", ["PUT /storage", "/commit/"])
def test_kill_during_push(hub: Any, store: Any, files: Any, identity: Identity, tmp_path: Path, pattern: str) -> None:
    here = store(tmp_path / "a", identity)
    before = files(here.root)
    killed(hub, pattern, ["push", "pair", "--repo", REPO, "--registry", str(here.root)])
    assert hub.commits(REPO) == [] and files(here.root) == before and verify(here).problems == []
    push("pair", REPO, root=here.root)
    assert len(hub.commits(REPO)) == 1 and pull(REPO, root=tmp_path / "b").status == "new"


@pytest.mark.parametrize("step", ["adopt_team", "move_in"])
def test_kill_between_adapters_and_team(
    hub: Any, store: Any, files: Any, pushed: dict[str, bytes], identity: Identity, tmp_path: Path, step: str
) -> None:
    """A new team comes in whole or not at all, so that half of another one cannot keep its name."""
    there, other = Registry(tmp_path / "b"), store(tmp_path / "a", identity, seed=7)
    push("pair", REPO, root=other.root)

    def run() -> None:
        setattr(Registry, step, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        pull(REPO, root=there.root)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL and files(there.root) == {} and there.teams() == verify(there).problems == []
    hub.add(REPO, dict(pushed))
    assert pull(REPO, root=there.root).status == "new" and verify(there).problems == []


@pytest.mark.parametrize("pattern", ["GET /.*/team.json", "GET /storage", "GET /.*/solver/README.md"])
def test_kill_during_pull(hub: Any, store: Any, files: Any, identity: Identity, tmp_path: Path, pattern: str) -> None:
    here, there = store(tmp_path / "a", identity), Registry(tmp_path / "b")
    push("pair", REPO, root=here.root)
    killed(hub, pattern, ["pull", REPO, "--registry", str(there.root)])
    assert verify(there).problems == [] and there.teams() == []
    pull(REPO, root=there.root)
    assert files(there.root) == files(here.root) and verify(there).problems == []
    assert not [p for p in there.root.iterdir() if p.name.startswith(".tmp")]
