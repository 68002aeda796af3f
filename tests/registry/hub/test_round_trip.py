"""push and pull through the real huggingface_hub client, against a hub in this process."""

from __future__ import annotations

import json
import logging
import multiprocessing
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import constants

from teamtr_lora.base.source import resolve
from teamtr_lora.cli import main
from teamtr_lora.common.files import sha256
from teamtr_lora.registry.hub import pull, push
from teamtr_lora.registry.identity import Identity, identify
from teamtr_lora.registry.manifest import own_hash
from teamtr_lora.registry.pushed_files import fingerprint
from teamtr_lora.registry.registry_store import Registry
from teamtr_lora.registry.verify import verify

TOKEN, STRANGER = "hf_aSecretThatNobodyMaySee", "hf_anotherAccount"  # as in conftest.py
REPO = "alice/team"
WEIGHTS = "adapter_model.safetensors"


def test_a_round_trip_is_bit_identical_and_one_commit(
    hub: Any, store: Any, files: Any, identity: Identity, tmp_path: Path
) -> None:
    here = store(tmp_path / "a", identity)
    first = push("pair", REPO, root=here.root)
    assert first.created and len(hub.commits(REPO)) == 1 and not hub.repos[REPO].private
    wanted = {"team.json", "history.json", "README.md", ".gitattributes"}
    wanted |= {f"{a}/{f}" for a in ("planner", "solver") for f in (WEIGHTS, "adapter_config.json", "README.md", "manifest.json")}
    assert hub.files(REPO).keys() == wanted
    there = Registry(tmp_path / "b")
    pulled = pull(REPO, root=there.root)
    assert pulled.status == "new" and files(there.root) == files(here.root) and len(files(here.root)) == 9
    assert verify(here).problems == verify(there).problems == []
    assert not hub.storage_saw_token, "the token went to the storage host"
    assert not (tmp_path / "hf").exists(), "something was written outside the registry"

    hub.asked.clear()
    assert push("pair", REPO, root=there.root).unchanged and len(hub.commits(REPO)) == 1
    assert not [line for line in hub.asked if line.startswith("PUT")]
    hub.sent.clear()
    again = pull(REPO, root=there.root)
    assert again.status == "already here" and {name for _, name, _ in hub.sent} == {"team.json", "history.json"}
    assert files(there.root) == files(here.root)


def test_a_changed_team_becomes_a_later_version(hub: Any, store: Any, swapped: Any, identity: Identity, tmp_path: Path) -> None:
    here, there = store(tmp_path / "a", identity), Registry(tmp_path / "b")
    push("pair", REPO, root=here.root)
    pull(REPO, root=there.root)
    for seed in (11, 12):  # two versions further: the one between was never pushed
        swapped(here, identity, seed)
    push("pair", REPO, root=here.root)
    hub.sent.clear()
    assert pull(REPO, root=there.root).status == "updated"
    assert there.numbers("pair") == [1, 3] and there.team("pair") == here.team("pair") and verify(there).problems == []
    assert not [path for _, path, _ in hub.sent if path.startswith("planner/")], "an adapter that is here was fetched again"
    old = hub.commits(REPO)[0].oid
    assert pull(REPO, revision=old, root=there.root).current == 3 and there.numbers("pair") == [1, 3]
    assert pull(REPO, revision=old, root=tmp_path / "c").number == 1


def test_another_team_of_the_same_name_needs_another_name(
    hub: Any, store: Any, swapped: Any, files: Any, said: Any, identity: Identity, tmp_path: Path
) -> None:
    push("pair", REPO, root=store(tmp_path / "a", identity).root)
    mine = store(tmp_path / "b", identity, seed=50)
    before = files(mine.root)
    line = said("pull", REPO, "--registry", mine.root)
    assert "--name pair-2" in line and files(mine.root) == before
    swapped(mine, identity, 60)  # a longer line of its own is no reason to mix them either
    line = said("pull", REPO, "--registry", mine.root)
    assert "--name pair-2" in line
    assert pull(REPO, root=mine.root, name="pair-2").status == "new"
    assert verify(mine).problems == [] and mine.team("pair-2").agents == Registry(tmp_path / "a").team("pair").agents
    assert pull(REPO, root=mine.root, name="pair-2").status == "already here"
    swapped(Registry(tmp_path / "a"), identity, 70)
    push("pair", REPO, root=tmp_path / "a")
    assert pull(REPO, root=mine.root, name="pair-2").status == "updated" and verify(mine).problems == []
    line = said("pull", REPO, "--registry", mine.root, "--name", "../x")
    assert "--name" in line


def test_branches_and_private_repositories(
    hub: Any, store: Any, files: Any, said: Any, identity: Identity, tmp_path: Path
) -> None:
    here = store(tmp_path / "a", identity)
    push("pair", REPO, private=True, revision="next/try", root=here.root)
    assert hub.repos[REPO].private and not hub.commits(REPO) and len(hub.commits(REPO, "next/try")) == 1
    assert pull(REPO, revision="next/try", root=tmp_path / "b").status == "new"
    assert files(tmp_path / "b") == files(here.root)
    line = said("pull", REPO, "--registry", tmp_path / "c")
    assert "no team was pushed there" in line
    hub.add("alice/open", {"README.md": b"x"})
    line = said("push", "pair", "--repo", "alice/open", "--private", "--registry", here.root)
    assert "is public" in line and len(hub.commits("alice/open")) == 1
    line = said("push", "pair", "--repo", REPO, "--revision", "0" * 40, "--registry", here.root)
    assert "a push goes to a branch" in line


def test_an_agent_loads_by_its_name_in_plain_peft(hub: Any, store: Any, identity: Identity, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    here = store(tmp_path / "a", identity)
    push("pair", "alice/solver", agent="solver", root=here.root)
    repo = hub.files("alice/solver")
    assert repo.keys() == {WEIGHTS, "adapter_config.json", "README.md", "manifest.json", ".gitattributes"}
    assert b'PeftModel.from_pretrained(model, "alice/solver")' in repo["README.md"]
    assert json.loads(repo["manifest.json"])["files"]["README.md"] == sha256(repo["README.md"])
    assert b"solver=alice/solver" in repo["README.md"]
    ids, outputs = torch.arange(12)[None], []
    for where in ("alice/solver", here.folder("pair", "solver", here.team("pair").agents["solver"])):
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(resolve("nano")), str(where))
        with torch.no_grad():
            outputs.append(model(input_ids=ids).logits)
    assert torch.equal(*outputs) and float(outputs[0].std()) > 0


def test_the_teams_card_says_what_it_is(
    hub: Any, store: Any, swapped: Any, make_recipe: Any, identity: Identity, tmp_path: Path
) -> None:
    here = store(tmp_path / "a", identity, made=make_recipe(task={"name": "countdown"}))
    swapped(here, identity, 7, how="swap to | another `solver`")
    push("pair", REPO, root=here.root)
    card = hub.files(REPO)["README.md"].decode()
    head = yaml.safe_load(card.split("---")[1])
    assert head["library_name"] == "peft" and head["license"] == "apache-2.0" and "countdown" in head["tags"]
    for words in (*here.team("pair").agents.values(), "embedded in the package", identity.base.weights_hash[:16],
                 "swap to / another", f"teamtr-lora pull {REPO}", f'from_pretrained(model, "{REPO}", subfolder="planner")',
                 "solver=team/solver", "Made from team version 1"):  # fmt: skip
        assert words in card, words
    push("pair", "alice/first", root=store(tmp_path / "b", identity).root)
    assert "| `accuracy` | 0.75 |" in hub.files("alice/first")["README.md"].decode()


def test_a_repository_holds_one_thing(hub: Any, store: Any, said: Any, identity: Identity, tmp_path: Path) -> None:
    here = store(tmp_path / "a", identity)
    store(tmp_path / "a", identity, name="other", seed=5)
    push("pair", REPO, root=here.root)
    push("pair", "alice/solver", agent="solver", root=here.root)
    for words in (["pair", "--agent", "solver", "--repo", REPO], ["pair", "--repo", "alice/solver"], ["other", "--repo", REPO]):
        line = said("push", *words, "--registry", here.root)
        assert "choose another --repo" in line
    assert len(hub.commits(REPO)) == len(hub.commits("alice/solver")) == 1
    line = said("pull", "alice/solver", "--registry", tmp_path / "b")
    assert "one agent's adapter" in line


def test_an_agent_that_left_the_team_leaves_the_repository(hub: Any, store: Any, identity: Identity, tmp_path: Path) -> None:
    here = store(tmp_path / "a", identity)
    push("pair", REPO, root=here.root)
    whole = ["README.md", "adapter_config.json", WEIGHTS, "manifest.json"]
    mine = ["docs/README.md", "docs/notes.md", "web/manifest.json", f"merged/{WEIGHTS}", "gone/notes.md", "a/gone/README.md"]
    extra = dict.fromkeys([*(f"gone/{file}" for file in whole), *mine], b"x")
    hub.add(REPO, {**hub.files(REPO), **extra})
    pushed = push("pair", REPO, root=here.root)
    assert pushed.removed == [f"gone/{file}" for file in whole] and hub.files(REPO).keys() >= set(mine)
    assert push("pair", REPO, root=here.root).removed == []


def test_what_is_left_of_an_agent_named_in_the_team_leaves_too(
    hub: Any, store: Any, identity: Identity, pushed: dict[str, bytes], tmp_path: Path
) -> None:
    """Half a folder is an agent's where the team there says so."""
    there = json.loads(pushed["team.json"])
    there["agents"]["gone"] = there["agents"]["solver"]
    sealed = json.dumps(there | {"manifest_hash": own_hash(there)}).encode()
    hub.add(REPO, {**pushed, "team.json": sealed, "gone/README.md": b"x", "docs/README.md": b"mine"})
    assert push("pair", REPO, root=store(tmp_path / "a", identity).root).removed == ["gone/README.md"]
    assert "docs/README.md" in hub.files(REPO)


def test_what_a_repository_ignores_is_not_left_out_silently(
    hub: Any, store: Any, said: Any, identity: Identity, tmp_path: Path
) -> None:
    hub.add(REPO, {".gitignore": b"*.json\n"})
    line = said("push", "pair", "--repo", REPO, "--registry", store(tmp_path / "a", identity).root)
    assert ".gitignore" in line and len(hub.commits(REPO)) == 1


def test_a_hub_that_lists_no_sizes(hub: Any, said: Any, pushed: dict[str, bytes], tmp_path: Path) -> None:
    hub.lists_sizes = False
    hub.add(REPO, pushed)
    assert pull(REPO, root=tmp_path / "b").status == "new"
    hub.add(REPO, {**pushed, "team.json": pushed["team.json"] + b" " * (5 << 20)})
    hub.sent.clear()
    assert "bytes" in said("pull", REPO, "--registry", tmp_path / "c") and hub.sent == []


def test_two_pulls_at_once(hub: Any, pushed: dict[str, bytes], tmp_path: Path) -> None:
    hub.add(REPO, pushed)
    start = multiprocessing.get_context("fork").Process
    both = [start(target=lambda: sys.exit(main(["pull", REPO, "--registry", str(tmp_path / "b")]))) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    registry = Registry(tmp_path / "b")
    assert [process.exitcode for process in both] == [0, 0] and verify(registry).problems == [] and registry.teams() == ["pair"]


def test_a_dry_run_asks_nobody(
    hub: Any, store: Any, identity: Identity, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = store(tmp_path / "a", identity)
    assert main(["push", "pair", "--repo", REPO, "--dry-run", "--registry", str(here.root)]) == 0
    text = capsys.readouterr().out
    assert f"planner/{WEIGHTS}" in text and "11 files" in text and REPO in text
    assert main(["push", "pair", "--repo", REPO, "--dry-run", "--json", "--registry", str(here.root)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["commit"] is None and hub.asked == [] and hub.repos == {}
    assert push("pair", REPO, root=here.root).files == shown["files"]
    assert {path: len(data) for path, data in hub.files(REPO).items() if path != ".gitattributes"} == shown["files"]


def test_a_damaged_version_is_not_pushed(hub: Any, store: Any, said: Any, identity: Identity, tmp_path: Path) -> None:
    here = store(tmp_path / "a", identity)
    folder = here.folder("pair", "solver", here.team("pair").agents["solver"])
    for name in (WEIGHTS, "adapter_config.json", "README.md", "manifest.json"):
        good = (folder / name).read_bytes()
        (folder / name).write_bytes(good[:-3] + b"999")
        for extra in ([], ["--dry-run"]):
            line = said("push", "pair", "--repo", REPO, "--registry", here.root, *extra)
            assert name in line
        (folder / name).write_bytes(good)
    assert hub.asked == [] and verify(here).problems == []
    for words, about in ((["nobody", "--repo", REPO], "no run or team"), (["pair", "--repo", "alice"], "user/name"),
                         (["pair", "--agent", "solvr", "--repo", REPO], "'solver'")):  # fmt: skip
        assert about in said("push", *words, "--registry", here.root)
    (tmp_path / "run" / "adapters").mkdir(parents=True)
    (tmp_path / "run" / "recipe.yaml").write_text("")
    (tmp_path / "run" / "team.json").write_text("")
    assert f"adapters import {tmp_path / 'run'} --team run`" in said("push", tmp_path / "run", "--repo", REPO)


def test_nothing_of_this_machine_goes_up(hub: Any, store: Any, swapped: Any, make_recipe: Any, tmp_path: Path) -> None:
    home = tmp_path / "home" / "alice" / "my-base"
    shutil.copytree(resolve("nano"), home)
    made = make_recipe(
        base={"source": str(home)},
        output_dir=str(tmp_path / "runs"),
        rollout={"engine": "vllm_server", "server": {"urls": ["http://gpu7.internal:8000"], "adapter_root": "/mnt/shared/x"}},
        task={"name": "dataset", "path": str(home / "items.jsonl"), "reward": "rewards:exact"},
    )
    local = identify(str(home))
    here = store(tmp_path / "a", local, made=made)
    swapped(here, local, 9, how=f"swap with {home / 'adapter'}, aligned")
    pushed = push("pair", REPO, root=here.root)
    push("pair", "alice/solver", agent="solver", root=here.root)
    for repo in (REPO, "alice/solver"):
        for path, data in hub.files(repo).items():
            assert not re.search(rb"gpu7|/mnt/shared|" + str(tmp_path).encode(), data), (repo, path)
    assert {note.split(":")[0] for note in pushed.notes} == {"output_dir", "rollout.server", "task.path", "base.source"}
    assert b"model of its owner" in hub.files(REPO)["README.md"] and b"my-base" in hub.files(REPO)["README.md"]
    pulled = pull(REPO, root=tmp_path / "b")
    assert pulled.notes == [
        "task.reward = 'rewards:exact': Python code that you must supply; read it before you use it",
        "base.source = 'my-base': a base that you must supply, in a folder of that name",
        "task.path = 'items.jsonl': a file that you must supply",
    ]
    there = Registry(tmp_path / "b")
    team = there.team("pair")
    assert team.lineage[0].how == "swap with adapter, aligned" and team.load_recipe().rollout.engine == "transformers"
    assert team.agents == here.team("pair").agents and fingerprint(team) == fingerprint(here.team("pair"))
    assert verify(there).problems == []
    assert pull(REPO, root=here.root).status == "already here", "its owner has it"


def test_no_server_or_file_of_a_conversation_goes_up(
    hub: Any, store: Any, make_recipe: Any, identity: Identity, tmp_path: Path
) -> None:
    home, secret = tmp_path / "home", "http://gpu7.internal:8000/v1?token=hushed"
    files = {"path": "tasks.json", "database": "db.json", "policy": "policy.md", "split": "split.json"}
    task = {"name": "tau2_retail"} | {key: str(home / name) for key, name in files.items()}
    answers: list[dict[str, Any]] = [
        {"url": secret, "api_key_variable": "ACME_GPU7_API_KEY", "model": str(home / "llama")},
        {"script": str(home / "replies.jsonl")},
    ]
    expected: list[dict[str, Any]] = [
        {"url": None, "api_key_variable": "RESPONDER_API_KEY", "model": "llama"},
        {"script": "replies.jsonl"},
    ]
    server = {"urls": ["http://gpu7.internal:8001"], "api_key_variable": "ACME_GPU7_API_KEY"}
    for number, responder in enumerate(answers):
        made = make_recipe(
            task=task | {"responder": responder},
            rollout={"engine": "vllm_server", "server": server},
            tracking={"trackers": ["wandb"]},
        )
        here = store(tmp_path / f"a{number}", identity, made=made)
        notes = push("pair", f"alice/team{number}", root=here.root).notes
        for path, data in hub.files(f"alice/team{number}").items():
            assert not re.search(rb"gpu7|hushed\b|GPU7|wandb|" + str(tmp_path).encode(), data), path
        told = {"task.responder", "task.responder.model"} if number == 0 else {"task.responder.script"}
        told |= {f"task.{key}" for key in files} | {"rollout.server", "tracking"}
        assert {note.split(":")[0] for note in notes} == told and not [note for note in notes if "gpu7" in note]
        pull(f"alice/team{number}", root=tmp_path / f"b{number}")
        recipe = Registry(tmp_path / f"b{number}").team("pair").load_recipe().model_dump()
        assert {key: recipe["task"][key] for key in files} == files and recipe["rollout"]["engine"] == "transformers"
        assert recipe["task"]["responder"] | expected[number] == recipe["task"]["responder"]
        assert here.team("pair").load_recipe() == made, "at home everything stays"


def test_a_password_in_the_endpoint_is_not_shown(
    hub: Any, store: Any, identity: Identity, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = store(tmp_path / "a", identity)
    secret = hub.address.replace("://", "://alice:open-sesame@")
    monkeypatch.setattr(constants, "ENDPOINT", secret)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", secret)
    assert main(["push", "pair", "--repo", REPO, "--registry", str(here.root), "--dry-run", "--json"]) == 0
    hub.break_at("GET /api/models", status=400, times=10)
    assert main(["push", "pair", "--repo", REPO, "--registry", str(here.root), "--debug"]) == 2
    output = capsys.readouterr()
    assert json.loads(output.out)["url"].endswith(REPO) and "400" in output.err
    assert "open-sesame" not in output.out + output.err


def test_the_token_is_in_no_output_log_or_file(
    hub: Any,
    store: Any,
    files: Any,
    identity: Identity,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    here = store(tmp_path / "a", identity)
    with caplog.at_level(logging.DEBUG):
        for words in (["push", "pair", "--repo", REPO, "--debug"], ["push", "pair", "--repo", "alice/s", "--agent", "solver"],
                      ["pull", REPO, "--name", "twin", "--json"]):  # fmt: skip
            assert main([*words, "--registry", str(here.root)]) == 0
        hub.echo_token = True  # a hub that sends back what it was sent
        for status in (400, 403, 500):
            hub.break_at("GET /api/models", status=status, times=10)
            assert main(["pull", REPO, "--debug", "--registry", str(here.root)]) == 2
            hub.broken.clear()
    output = capsys.readouterr()
    everything = [output.out, output.err, caplog.text, *map(str, hub.asked)]
    assert "<token>" in output.err, "the hub did send it back"
    assert not [text for text in everything if TOKEN in text]
    for data in [*files(tmp_path).values(), *hub.files(REPO).values(), *hub.files("alice/s").values()]:
        assert TOKEN.encode() not in data
