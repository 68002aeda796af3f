"""A refused pull leaves the registry as it was, the team's name included; and whose programs a team runs is said before."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from teamtr_lora.base.versions import AdapterVersion, content_hash
from teamtr_lora.cli import main
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import sha256
from teamtr_lora.recipe import Recipe
from teamtr_lora.registry.hub import pull
from teamtr_lora.registry.identity import Identity
from teamtr_lora.registry.manifest import own_hash
from teamtr_lora.registry.registry_store import Registry
from teamtr_lora.registry.stored import find_team

REPO = "alice/team"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
Tensors = dict[str, torch.Tensor]


def forged(repo: dict[str, bytes], agent: str, tensors: Tensors, config: dict[str, Any]) -> None:
    """Another adapter for the agent, with every hash in the repository made to fit."""
    repo[f"{agent}/{WEIGHTS}"] = save_tensors(tensors, metadata={"format": "pt"})
    repo[f"{agent}/{CONFIG}"] = json.dumps(config).encode()
    manifest = json.loads(repo[f"{agent}/manifest.json"])
    version = AdapterVersion(agent, manifest["number"], content_hash(tensors, config))
    manifest |= version.stored()
    manifest["files"] |= {name: sha256(repo[f"{agent}/{name}"]) for name in (WEIGHTS, CONFIG)}
    repo[f"{agent}/manifest.json"] = json.dumps(manifest | {"manifest_hash": own_hash(manifest)}).encode()
    team = json.loads(repo["team.json"])
    team["agents"][agent] = version.name
    repo["team.json"] = json.dumps(team | {"manifest_hash": own_hash(team)}).encode()


def moved(tensors: Tensors, old: str, new: str) -> Tensors:
    return {name.replace(old, new): tensor for name, tensor in tensors.items()}


def wide(tensors: Tensors, part: str) -> Tensors:
    def wider(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros((tensor.shape[0] + 1, tensor.shape[1]) if part == "lora_B" else (tensor.shape[0], tensor.shape[1] + 1))

    return {name: wider(tensor) if part in name else tensor for name, tensor in tensors.items()}


ATTACKS: dict[str, Callable[[Tensors, dict[str, Any]], tuple[Tensors, dict[str, Any]]]] = {
    "B too wide": lambda t, c: (wide(t, "lora_B"), c),
    "A too wide": lambda t, c: (wide(t, "lora_A"), c),
    "another rank": lambda t, c: ({n: torch.zeros(3, 3) for n in t}, c | {"r": 3}),
    "a layer that is not there": lambda t, c: (moved(t, "layers.0", "layers.99"), c),
    "other modules": lambda t, c: (moved(t, "q_proj", "o_proj"), c | {"target_modules": ["o_proj"]}),
    "other modules than its config says": lambda t, c: (moved(t, "q_proj", "o_proj"), c),
    "one layer left out": lambda t, c: ({n: x for n, x in t.items() if "layers.0" not in n}, c),
    "another scale": lambda t, c: (t, c | {"lora_alpha": 400}),
    "A alone": lambda t, c: ({n: x for n, x in t.items() if "lora_A" in n}, c),
    "infinity": lambda t, c: ({n: x * float("inf") for n, x in t.items()}, c),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("agent", ["planner", "solver"])
def test_an_agent_that_cannot_be_used_stores_nothing(
    hub: Any, files: Any, said: Any, pushed: dict[str, bytes], tmp_path: Path, attack: str, agent: str
) -> None:
    repo = dict(pushed)
    config = json.loads(repo[f"{agent}/{CONFIG}"])
    forged(repo, agent, *ATTACKS[attack](load_tensors(repo[f"{agent}/{WEIGHTS}"]), config))
    hub.add(REPO, repo)
    root = tmp_path / "outer" / "b"
    assert said("pull", REPO, "--registry", root).startswith(f"teamtr-lora: {REPO}")
    assert files(root) == {} and sorted(p.name for p in root.iterdir()) in ([], [".pull"])
    hub.add(REPO, dict(pushed))
    assert pull(REPO, root=root).status == "new", "the honest team of that name"


def test_the_forger_s_own_tools_are_right(hub: Any, pushed: dict[str, bytes], tmp_path: Path) -> None:
    """Without a spoilt tensor the forged repository is a good one: what refuses the others is what is wrong with them."""
    repo = dict(pushed)
    tensors = load_tensors(repo[f"solver/{WEIGHTS}"])
    forged(repo, "solver", {name: tensor + 1 for name, tensor in tensors.items()}, json.loads(repo[f"solver/{CONFIG}"]))
    hub.add(REPO, repo)
    assert pull(REPO, root=tmp_path / "b").status == "new"


@pytest.mark.parametrize("attack", ["another rank", "other modules", "A alone", "infinity", "another scale"])
def test_as_much_as_can_be_is_checked_without_the_base(
    hub: Any, files: Any, said: Any, pushed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: str
) -> None:
    for place in ("pulled_files", "registry_store"):
        monkeypatch.setattr(f"teamtr_lora.registry.{place}.present", lambda *_: None)
    repo = dict(pushed)
    forged(repo, "solver", *ATTACKS[attack](load_tensors(repo[f"solver/{WEIGHTS}"]), json.loads(repo[f"solver/{CONFIG}"])))
    hub.add(REPO, repo)
    said("pull", REPO, "--registry", tmp_path / "b")
    assert files(tmp_path / "b") == {}
    hub.add(REPO, dict(pushed))
    assert pull(REPO, root=tmp_path / "b").status == "new"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_what_fails_between_adapters_and_team_takes_back_the_adapters(
    hub: Any, files: Any, pushed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    hub.add(REPO, dict(pushed))

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as broken, pytest.raises((UserError, OSError, KeyboardInterrupt)):
        broken.setattr("teamtr_lora.registry.registry_store.create_atomic", fail)
        pull(REPO, root=tmp_path / "b")
    assert files(tmp_path / "b") == {} and not (tmp_path / "b" / "pair").exists()
    assert pull(REPO, root=tmp_path / "b").status == "new"


# --- programs of a dataset


def puzzles(path: Path) -> None:
    """Items whose programs leave a mark where they are run unprotected, and call every answer right."""
    check = "def inputs_check(inputs):\n    return True\n"
    constraints = "constraint_list = [lambda inputs: True]\n"
    row = {"prompt": "Who sits where?", "code": {"Inputs_Check_code": check, "Constraint_List_code": constraints}}
    path.write_text("".join(json.dumps({**row, "id": str(n), "prompt": f"{row['prompt']} {n}"}) + "\n" for n in range(30)))


@pytest.fixture
def theirs(store: Any, identity: Identity, make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TEAMTR_LORA_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TEAMTR_LORA_TRUST_PROGRAMS", raising=False)
    monkeypatch.chdir(tmp_path)
    puzzles(tmp_path / "puzzles.jsonl")
    made = make_recipe(
        task={"name": "autologi", "path": "puzzles.jsonl"}, evaluation={"items": 1}, rollout={"max_message_tokens": 2}
    )
    store(tmp_path / "teams", identity, made=made)
    return tmp_path


def test_a_stored_team_runs_programs_only_once_they_are_trusted(
    theirs: Path, said: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate = ["eval", "teams/pair", "--limit", "1", "--k", "1"]
    line = said(*evaluate)
    assert str(theirs / "puzzles.jsonl") in line and "--trust-programs" in line and "TEAMTR_LORA_TRUST_PROGRAMS=sandboxed" in line
    for command in (["swap", "teams/pair", "--agent", "solver", "--with", "fresh"], ["rebase", "teams/pair", "--to", "nano"]):
        assert "--trust-programs" in said(*command)
    assert main(["ask", "teams/pair", "hello"]) == 0, "talking to the team plays no task"
    assert main([*evaluate, "--trust-programs"]) == 0
    assert main(evaluate) == 0, "once"
    capsys.readouterr()
    puzzles(theirs / "others.jsonl")
    recipe = find_team("teams/pair").recipe
    assert recipe.task.programs_of(recipe.folder) == str(theirs / "puzzles.jsonl")


def test_the_variable_says_the_same(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, works in (("", False), ("1", False), ("sandboxed", True)):
        monkeypatch.setenv("TEAMTR_LORA_TRUST_PROGRAMS", value)
        if works:
            find_team("teams/pair")
        else:
            with pytest.raises(UserError, match="trust-programs"):
                find_team("teams/pair")
    monkeypatch.delenv("TEAMTR_LORA_TRUST_PROGRAMS")
    find_team("teams/pair")


@pytest.mark.parametrize("text", ["", "{", "null", "[[1]]", "{}", "[" * 100000])
def test_a_damaged_list_of_trusted_datasets_trusts_nobody(theirs: Path, text: str) -> None:
    (theirs / "cache").mkdir()
    (theirs / "cache" / "trusted_programs.json").write_text(text)
    with pytest.raises(UserError, match="trust-programs"):
        find_team("teams/pair")


def test_a_team_cannot_bring_the_trust_along(theirs: Path) -> None:
    for place in (theirs / "teams", theirs / "teams" / "pair", theirs):
        (place / "trusted_programs.json").write_text(json.dumps([str(theirs / "puzzles.jsonl")]))
    with pytest.raises(UserError, match="trust-programs"):
        find_team("teams/pair")


def test_generated_puzzles_need_no_trust(theirs: Path, store: Any, identity: Identity, make_recipe: Any) -> None:
    store(theirs / "own", identity, made=make_recipe(task={"name": "autologi"}))
    assert find_team("own/pair").recipe.task.name == "autologi"


def test_a_pull_names_the_dataset(hub: Any, store: Any, identity: Identity, make_recipe: Any, tmp_path: Path) -> None:
    made: Recipe = make_recipe(task={"name": "autologi", "hub": "someone/puzzles"})
    store(tmp_path / "a", identity, made=made)
    assert main(["push", "pair", "--repo", REPO, "--registry", str(tmp_path / "a")]) == 0
    notes = pull(REPO, root=tmp_path / "b").notes
    assert any("programs" in note and "someone/puzzles" in note and "--trust-programs" in note for note in notes)
    with pytest.raises(UserError, match=r"someone/puzzles.*--trust-programs"):
        find_team(tmp_path / "b" / "pair")
    assert Registry(tmp_path / "b").teams() == ["pair"]
