"""`verify` names everything that does not fit, and nothing that does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from teamtr_lora.base.source import resolve
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import dump_json, sha256
from teamtr_lora.registry.manifest import own_hash
from teamtr_lora.registry.registry_store import Registry
from teamtr_lora.registry.stored import find_team
from teamtr_lora.registry.verify import verify

WEIGHTS = "adapter_model.safetensors"


def planner(registry: Registry) -> Path:
    return registry.folder("demo", "planner", registry.team("demo").agents["planner"])


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def alter(path: Path, **changes: Any) -> None:
    path.write_text(dump_json({**json.loads(path.read_text()), **changes}))


def rewrite(path: Path, **changes: Any) -> None:
    """What a careful forger would do: the manifest's own hash fits again."""
    alter(path, **changes)
    alter(path, manifest_hash=own_hash(json.loads(path.read_text())))


def altered(name: str, **changes: Any) -> Callable[[Registry], None]:
    return lambda registry: alter(planner(registry) / name, **changes)


def rehash(folder: Path) -> None:
    """The manifest's file hashes fit again."""
    manifest = json.loads((folder / "manifest.json").read_text())
    rewrite(folder / "manifest.json", files={name: sha256((folder / name).read_bytes()) for name in manifest["files"]})


def other_weights(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    name = sorted(tensors)[0]
    tensors[name][0, 0] = torch.nextafter(tensors[name][0, 0], torch.tensor(10.0))  # the smallest change there is
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    rehash(folder)


DAMAGE: dict[str, tuple[Callable[[Registry], Any], list[str]]] = {
    "a bit of the weights": (lambda r: flip(planner(r) / WEIGHTS, -5), [WEIGHTS, "does not match its hash"]),
    "a bit of the config": (lambda r: flip(planner(r) / "adapter_config.json", 30), ["adapter_config.json", "hash"]),
    "the card": (lambda r: (planner(r) / "README.md").write_text("# trust me"), ["README.md", "hash"]),
    "weights and their hash": (lambda r: other_weights(planner(r)), ["content does not match its hash"]),
    "a file is gone": (lambda r: (planner(r) / WEIGHTS).unlink(), [WEIGHTS, "missing"]),
    "the manifest is gone": (lambda r: (planner(r) / "manifest.json").unlink(), ["manifest.json", "missing"]),
    "the manifest is cut": (lambda r: (planner(r) / "manifest.json").write_text('{"team": "de'), ["manifest.json", "JSON"]),
    "an extra file": (lambda r: (planner(r) / "x.bin").write_bytes(b"\x80"), ["x.bin", "not in the manifest"]),
    "the version is gone": (lambda r: shutil.rmtree(planner(r)), ["team-0001.json", "planner", "missing"]),
    "a copied version": (
        lambda r: shutil.copytree(planner(r), planner(r).with_name("v0007-0123456789ab")),
        ["v0007-0123456789ab", "moved or altered"],
    ),
    "somebody else's base": (
        lambda r: rewrite(planner(r) / "manifest.json", base={"source": "nano", "revision": None, "weights_hash": "0" * 64}),
        ["planner", "not those it was made for"],
    ),
    "another tokenizer": (lambda r: rewrite(planner(r) / "manifest.json", tokenizer_hash="0" * 64), ["planner", "tokenizer"]),
    **{
        f"{key} of an adapter": (altered("manifest.json", **change), ["planner", "manifest_hash"])
        for key, change in {
            "metrics": {"metrics": {"avg_at_k": 0.99}},
            "made_by": {"made_by": "import"},
            "parent": {"parent": "v0001-0123456789ab"},
            "protocol_hash": {"protocol_hash": "0" * 64},
            "created": {"created": "2001-01-01T00:00:00Z"},
        }.items()
    },
    **{
        f"{key} of a team": (altered("../../team-0001.json", **change), ["team-0001.json", "manifest_hash"])
        for key, change in {"metrics": {"metrics": {}}, "made_by": {"made_by": "swap"}}.items()
    },
    "the base by another name": (
        lambda r: rewrite(planner(r) / "manifest.json", base=r.team("demo").base.model_dump() | {"source": "x"}),
        ["team-0001.json", "names the base 'x', the team names 'nano'"],
    ),
    "another protocol": (lambda r: rewrite(r.root / "demo" / "team-0001.json", protocol_hash="0" * 64), ["protocol_hash"]),
    "a role in the recipe": (
        lambda r: rewrite(
            r.root / "demo" / "team-0001.json",
            recipe={**r.team("demo").recipe, "team": {**r.team("demo").recipe["team"], "router": {"rounds": 2}}},
        ),
        ["team-0001.json", "protocol_hash"],
    ),
    "a scale in the recipe": (
        lambda r: rewrite(
            r.root / "demo" / "team-0001.json",
            recipe=r.team("demo").load_recipe().with_loras({"planner": {"rank": 4, "alpha": 16.0}}).model_dump(mode="json"),
        ),
        ["team-0001.json", "alpha 8.0, the recipe says 16.0"],
    ),
    "no recipe": (lambda r: rewrite(r.root / "demo" / "team-0001.json", recipe={"team": 1}), ["team-0001.json", "recipe"]),
    "a stray file": (lambda r: (r.root / "demo" / "notes.txt").write_text("x"), ["notes.txt", "does not belong"]),
    "a stray folder": (lambda r: (r.root / "Not A Team").mkdir(), ["Not A Team", "not a team"]),
    "a linked team": (lambda r: (r.root / "other").symlink_to(r.root / "demo"), ["other", "not a team"]),
    "a team number twice": (
        lambda r: shutil.copy(r.root / "demo" / "team-0001.json", r.root / "demo" / "team-00001.json"),
        ["team-00001.json", "does not belong"],
    ),
}  # fmt: skip


def test_a_good_registry_has_no_problem(filled: Registry) -> None:
    found = verify(filled)
    assert (found.adapters, found.teams, found.problems, found.notes) == (2, 1, [], [])
    assert verify(filled, "demo").problems == []


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(filled: Registry, damage: str) -> None:
    spoil, words = DAMAGE[damage]
    spoil(filled)
    problems = [str(problem) for problem in verify(filled).problems]
    assert any(all(word in problem for word in words) for problem in problems), problems
    assert not any("\n" in problem for problem in problems)


def test_a_base_that_is_not_here_is_said(filled: Registry) -> None:
    """Its hashes cannot be computed again; everything else still is."""
    for path in filled.root.rglob("*.json"):
        if path.name == "manifest.json" or path.name.startswith("team-"):
            data = json.loads(path.read_text())
            data["base"]["source"] = "wheel:not-here==1.0"
            if "recipe" in data:
                data["recipe"]["base"]["source"] = "wheel:not-here==1.0"
            path.write_text(dump_json(data | {"manifest_hash": own_hash(data)}))
    found = verify(filled)
    assert not found.problems and len(found.notes) == 1 and "wheel:not-here" in found.notes[0]


@pytest.mark.parametrize("source", ["x" * 999, "~nobody-here/x", "a/" * 400 + "b"])
def test_a_base_by_a_name_that_no_disk_takes_is_no_crash(filled: Registry, source: str) -> None:
    for path in [*filled.root.glob("demo/*/*/manifest.json"), filled.root / "demo" / "team-0001.json"]:
        data = json.loads(path.read_text())
        changes = {"base": data["base"] | {"source": source}}
        if "recipe" in data:
            changes["recipe"] = data["recipe"] | {"base": data["recipe"]["base"] | {"source": source}}
        rewrite(path, **changes)
    found = verify(filled)
    assert not found.problems and len(found.notes) == 1
    with pytest.raises(UserError):
        find_team(filled.root / "demo")
    with pytest.raises(UserError):
        resolve(source)
