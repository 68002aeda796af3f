"""pull from repositories that somebody tampered with: nothing is stored, nothing runs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import sha256
from teamtr_lora.common.settings import Section
from teamtr_lora.recipe import Recipe
from teamtr_lora.recipe.named import LOCAL_CHOICES, LOCAL_FILES, PATHS_OR_NAMES
from teamtr_lora.registry.hub import pull, push
from teamtr_lora.registry.identity import Identity
from teamtr_lora.registry.manifest import own_hash
from teamtr_lora.registry.registry_store import Registry
from teamtr_lora.registry.verify import verify
from teamtr_lora.tasks.table import FAMILIES

TOKEN, STRANGER = "hf_aSecretThatNobodyMaySee", "hf_anotherAccount"  # as in conftest.py
REPO = "alice/team"
WEIGHTS = "adapter_model.safetensors"


def sealed(repo: dict[str, bytes], name: str) -> None:
    """As a careful forger leaves a manifest: its own hash fits again, so that something else has to give it away."""
    data = json.loads(repo[name])
    repo[name] = json.dumps(data | {"manifest_hash": own_hash(data)}).encode()


def replaced(key: str, value: Any) -> Callable[[dict[str, bytes]], None]:
    """team.json with another value under a dotted key."""

    def change(repo: dict[str, bytes]) -> None:
        data = json.loads(repo["team.json"])
        *path, last = key.split(".")
        inner = data
        for part in path:
            inner = inner[part]
        inner[last] = value
        repo["team.json"] = json.dumps(data).encode()
        sealed(repo, "team.json")

    return change


def renamed_agent(name: str) -> Callable[[dict[str, bytes]], None]:
    """The solver under a name that is meant to lead somewhere else, everywhere it is named."""

    def change(repo: dict[str, bytes]) -> None:
        for path in [path for path in repo if path.startswith("solver/")]:
            repo[f"{name}/{path.partition('/')[2]}"] = repo.pop(path).replace(b'"solver"', json.dumps(name).encode())
        repo["team.json"] = repo["team.json"].replace(b'"solver"', json.dumps(name).encode())
        sealed(repo, "team.json")
        sealed(repo, f"{name}/manifest.json")

    return change


def spoiled_weights(spoil: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[dict[str, bytes]], None]:
    """Other tensors, with the file's hash in the manifest made to fit."""

    def change(repo: dict[str, bytes]) -> None:
        found = load_tensors(repo[f"solver/{WEIGHTS}"])
        spoil(found)
        repo[f"solver/{WEIGHTS}"] = save_tensors(found)
        manifest = json.loads(repo["solver/manifest.json"])
        manifest["files"][WEIGHTS] = sha256(repo[f"solver/{WEIGHTS}"])
        repo["solver/manifest.json"] = json.dumps(manifest).encode()
        sealed(repo, "solver/manifest.json")

    return change


def pickled(repo: dict[str, bytes]) -> None:
    repo["solver/adapter_model.bin"] = repo.pop(f"solver/{WEIGHTS}")


def pickle_inside(repo: dict[str, bytes]) -> None:
    repo[f"solver/{WEIGHTS}"] = b"\x80\x04cos\nsystem\n(S'touch /x'\ntR."
    manifest = json.loads(repo["solver/manifest.json"])
    manifest["files"][WEIGHTS] = sha256(repo[f"solver/{WEIGHTS}"])
    repo["solver/manifest.json"] = json.dumps(manifest).encode()
    sealed(repo, "solver/manifest.json")


def grown(name: str, size: int) -> Callable[[dict[str, bytes]], None]:
    return lambda repo: repo.update({name: repo[name] + b" " * size})


def edited(name: str, old: bytes, new: bytes) -> Callable[[dict[str, bytes]], None]:
    return lambda repo: repo.update({name: repo[name].replace(old, new, 1)})


def first_of(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return next(iter(tensors.values()))


PATHS = [
    "../solver",
    "..",
    "/solver",
    "/etc/solver",
    "a/b",
    "a\\b",
    "C:\\x",
    "Solver",
    "sölver",
    "solver\u202e",
    "solver ",
    ".",
    ".git",
    "",
]


ATTACKS = {
    **{f"agent {name!r}": renamed_agent(name) for name in PATHS},
    **{f"team {name!r}": replaced("team", name) for name in PATHS[::3]},
    **{f"version {name!r}": replaced("agents.solver", name) for name in ("../x", "v0001-../../../..", "v0001-0123456789AB")},
    "version not there": replaced("agents.solver", "v0001-0123456789ab"),
    "number": replaced("number", 0),
    "number of ten digits": replaced("number", 10**10),
    "unknown key": replaced("run", "curl"),
    "unknown recipe key": replaced("recipe.hooks", ["os:system"]),
    "another protocol": replaced("recipe.team.protocol.system", "Do as I say."),
    "another scale": lambda repo: (edited("team.json", b'"alpha": 4.0', b'"alpha": 400.0')(repo), sealed(repo, "team.json")),
    "a metric": edited("team.json", b'"accuracy": 0.75', b'"accuracy": 0.99'),
    "a metric of an agent": edited("solver/manifest.json", b'"accuracy": 0.5', b'"accuracy": 0.9'),
    "servers": replaced("recipe.rollout.server.urls", ["http://127.0.0.1:1"]),
    "adapter root": replaced("recipe.rollout.server.adapter_root", "/"),
    "output folder": replaced("recipe.output_dir", "/tmp"),
    "base path": replaced("recipe.base.source", "/etc"),
    "base path up": replaced("recipe.base.source", "../../base"),
    "base path home": replaced("recipe.base.source", "~/base"),
    "both base paths": lambda repo: [replaced(key, "/etc")(repo) for key in ("recipe.base.source", "base.source")],
    "another base": replaced("base.weights_hash", "0" * 64),
    "no json": lambda repo: repo.update({"team.json": b"\xff{"}),
    "a list": lambda repo: repo.update({"team.json": b"[]"}),
    "deep json": lambda repo: repo.update({"team.json": b'{"a":' * 100_000}),
    "a key twice": edited("team.json", b'"team":', b'"team": "pair", "team":'),
    "large team": grown("team.json", 5 << 20),
    "large card": grown("solver/README.md", 5 << 20),
    "no team": lambda repo: repo.pop("team.json") and None,
    "no manifest": lambda repo: repo.pop("solver/manifest.json") and None,
    "no weights": lambda repo: repo.pop(f"solver/{WEIGHTS}") and None,
    "only a pickle": pickled,
    **{
        f"with {name}": lambda repo, name=name: repo.update({name: b"\x80\x04."})
        for name in ("solver/adapter_model.bin", "x.pkl", "solver/checkpoint/optimizer.pt", "../x", "/etc/x", "a/../../x")
    },
    "a pickle called safetensors": pickle_inside,
    "a bit of the weights": lambda repo: repo.update({f"solver/{WEIGHTS}": repo[f"solver/{WEIGHTS}"][:-1] + b"\x01"}),
    "a bit of the config": edited("solver/adapter_config.json", b'"lora_alpha": 4', b'"lora_alpha": 5'),
    "a bit of the card": edited("solver/README.md", b"#", b"##"),
    "a manifest's claim": edited("solver/manifest.json", b'"content_hash": "', b'"content_hash": "0'),
    "NaN": spoiled_weights(lambda found: first_of(found).fill_(float("nan"))),
    "infinity": spoiled_weights(lambda found: first_of(found).fill_(float("inf"))),
    "other numbers": spoiled_weights(lambda found: first_of(found).add_(1)),
    "a path for a name": spoiled_weights(lambda found: found.update({"../../x": torch.zeros(2, 2)})),
    "history": lambda repo: repo.update({"history.json": b'{"../1": "x"}'}),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_repository_that_was_tampered_with_stores_nothing(
    hub: Any, files: Any, said: Any, pushed: dict[str, bytes], tmp_path: Path, attack: str
) -> None:
    repo = dict(pushed)
    ATTACKS[attack](repo)
    hub.add(REPO, repo)
    root = tmp_path / "outer" / "b"
    line = said("pull", REPO, "--registry", root)
    assert line.startswith(f"teamtr-lora: {REPO}") and "\x1b" not in line
    assert files(tmp_path / "outer") == {} and Registry(root).teams() == []
    assert sorted(p.name for p in root.iterdir()) in ([], [".pull"]), "nothing is left behind"


TAU2 = {"name": "tau2_retail", "path": "tasks.json"}
CHOICES = [  # what a stranger's recipe would have this machine read, write, call or send
    ("task", "task.responder.url", TAU2 | {"responder": {"url": "https://evil.example/v1", "api_key_variable": "MY_API_KEY"}}),
    ("task", "task.responder.url", TAU2 | {"responder": {"url": "http://127.0.0.1:8000/v1"}}),
    ("task", "task.responder.api_key_variable", TAU2 | {"responder": {"api_key_variable": "OPENAI_API_KEY"}}),
    ("task", "task.responder.script", TAU2 | {"responder": {"script": "../replies.jsonl"}}),
    ("task", "task.responder.model", TAU2 | {"responder": {"model": "/srv/models/x"}}),
    ("task", "task.database", TAU2 | {"database": "/etc/x.json"}),
    ("task", "task.policy", TAU2 | {"policy": "/home/u/.ssh/id_rsa"}),
    ("task", "task.policy", TAU2 | {"policy": "~/.ssh/id_rsa"}),
    ("task", "task.split", TAU2 | {"split": "C:\\split.json"}),
    ("task", "task.path", TAU2 | {"path": "\\\\host\\tasks.json"}),
    ("task", "task.test_path", TAU2 | {"test_path": "a/../../b.json"}),
    ("task", "task.hub", {"name": "gsm8k", "hub": "/home/u"}),
    (
        "task",
        "task.responder.api_key_variable",
        {"name": "arbench_dc", "hub": "a/b", "responder": {"api_key_variable": "A_API_KEY"}},
    ),
    ("rollout.server.api_key_variable", "rollout.server.api_key_variable", "OPENAI_API_KEY"),
    ("tracking.trackers", "tracking.trackers", ["wandb"]),
]


@pytest.mark.parametrize(("where", "key", "value"), CHOICES)
def test_a_strangers_recipe_chooses_nothing_for_this_machine(
    hub: Any, said: Any, pushed: dict[str, bytes], tmp_path: Path, where: str, key: str, value: Any
) -> None:
    repo = dict(pushed)
    replaced(f"recipe.{where}", value)(repo)
    hub.add(REPO, repo)
    line = said("pull", REPO, "--registry", tmp_path / "b")
    assert f"its recipe sets {key} to " in line and "for this machine to choose" in line
    assert Registry(tmp_path / "b").teams() == []


def test_what_a_conversation_needs_is_told(hub: Any, pushed: dict[str, bytes], tmp_path: Path) -> None:
    task = TAU2 | {"database": "d/db.json", "policy": "policy.md", "split": "split.json"}
    repo = dict(pushed)
    replaced("recipe.task", task | {"responder": {"model": "org/model", "api_key_variable": "RESPONDER_API_KEY"}})(repo)
    hub.add(REPO, repo)
    needed = ["task.path", "task.database", "task.policy", "task.split"]
    notes = pull(REPO, root=tmp_path / "b").notes
    assert [note.split(" = ")[0] for note in notes[:4]] == needed
    assert len(notes) == 5 and notes[4].startswith("task.responder.url: a server that you must supply")
    replaced("recipe.task", task | {"responder": {"script": "replies.jsonl"}})(repo)
    hub.add(REPO, repo)
    notes = pull(REPO, root=tmp_path / "c").notes
    assert [note.split(" = ")[0] for note in notes] == [*needed, "task.responder.script"]


def test_every_key_that_names_something_of_a_machine_is_known() -> None:
    """By what the keys say of themselves, so that a new one cannot be forgotten."""
    known: dict[str, str] = {}

    def look(section: type[Section], prefix: str) -> None:
        for name, field in section.model_fields.items():
            known[f"{prefix}{name}"] = field.description or ""
            if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
                look(field.annotation, f"{prefix}{name}.")

    look(Recipe, "")
    for family in FAMILIES:
        look(family, "task.")
    files = {key for key, text in known.items() if "relative to the recipe" in text}
    assert files == set(LOCAL_FILES)
    words = ("Address", "Environment variable", "Folder", "run directory itself", "Trackers")
    assert {key for key, text in known.items() if text.startswith(words) or words[3] in text} == set(LOCAL_CHOICES)
    assert known.keys() >= set(PATHS_OR_NAMES)


def test_only_files_of_known_names_are_fetched(hub: Any, store: Any, files: Any, identity: Identity, tmp_path: Path) -> None:
    here = store(tmp_path / "a", identity)
    push("pair", REPO, root=here.root)
    odd = ["solver/evil.py", "modeling.py", "solver/checkpoint/adapter_model.safetensors", "tokenizer.json"]
    hub.add(REPO, {**hub.files(REPO), **dict.fromkeys(odd, b"import os")})
    hub.sent.clear()
    assert pull(REPO, root=tmp_path / "b").status == "new" and files(tmp_path / "b") == files(here.root)
    assert {name.rpartition("/")[2] for _, name, _ in hub.sent} == {
        "team.json", "history.json", "manifest.json", "README.md", "adapter_config.json", WEIGHTS,
    }  # fmt: skip


def test_code_that_a_recipe_names_is_not_imported(
    hub: Any, store: Any, make_recipe: Any, identity: Identity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loaded_by_pull.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = make_recipe(task={"name": "dataset", "path": "items.jsonl", "reward": ["loaded_by_pull:one", "loaded_by_pull:two"]})
    push("pair", REPO, root=store(tmp_path / "a", identity, made=made).root)
    notes = pull(REPO, root=tmp_path / "b").notes
    assert [note.split(" = ")[0] for note in notes] == ["task.reward.0", "task.reward.1", "task.path"]
    assert b"loaded_by_pull:two" in hub.files(REPO)["README.md"]


def test_fuzzed_manifests_are_refused_or_harmless(hub: Any, files: Any, pushed: dict[str, bytes], tmp_path: Path) -> None:
    """Any value of team.json or a manifest replaced by a strange one: a clear refusal, or a registry that verifies."""
    chance = random.Random(0)
    strange = [
        None,
        True,
        -1,
        10**30,
        1e308,
        "",
        "..",
        "/etc/passwd",
        "a\x00b",
        "\ud800",
        "x" * 70,
        [],
        {},
        [[]],
        {"a": {}},
        "nan",
    ]
    for turn in range(20):
        name = chance.choice(["team.json", "solver/manifest.json", "history.json", "solver/adapter_config.json"])
        data = json.loads(pushed[name])
        inner: Any = data
        while isinstance(inner, dict | list) and inner:
            keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
            key = chance.choice(keys)
            if not isinstance(inner[key], dict | list) or not inner[key] or chance.random() < 0.3:
                inner[key] = chance.choice(strange)
                break
            inner = inner[key]
        repo = {**pushed, name: json.dumps(data).encode()}
        if name in ("team.json", "solver/manifest.json") and isinstance(data, dict):
            sealed(repo, name)
        hub.add(REPO, repo)
        root = tmp_path / f"b{turn}"
        try:
            pull(REPO, root=root)
        except UserError as error:
            assert "\n" not in str(error) or hasattr(error, "problems")
            assert files(root) == {}
        else:
            assert verify(Registry(root)).problems == []
