"""The registry: what is published comes back bit for bit, nothing is ever overwritten, and nothing leads out of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from teamtr_lora.base.versions import content_hash, read_adapter_folder
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import sha256
from teamtr_lora.registry.identity import Identity, protocol_hash
from teamtr_lora.registry.manifest import BaseIdentity, Replaced, own_hash
from teamtr_lora.registry.registry_store import Registry
from teamtr_lora.registry.verify import verify


def publish(registry: Registry, bank: Any, identity: Identity, recipe: Any, agent: str = "planner", scale: float = 1.0) -> Any:
    tensors = {name: tensor * scale for name, tensor in bank.tensors(agent).items()}
    return registry.publish_adapter(
        "demo", agent, tensors, bank.config(agent), identity=identity, protocol_hash=protocol_hash(recipe.team), made_by="swap",
    )  # fmt: skip


def test_what_is_published_comes_back_bit_for_bit(filled: Registry, bank: Any) -> None:
    assert filled.teams() == ["demo"] and filled.agents("demo") == ["checker", "planner"]
    team = filled.team("demo")
    assert team.number == 1 and team.parent is None and set(team.agents) == {"planner", "checker"}
    for agent, version in team.agents.items():
        tensors, config = read_adapter_folder(filled.folder("demo", agent, version))
        assert tensors.keys() == bank.tensors(agent).keys() and config == bank.config(agent)
        assert all(torch.equal(tensor, bank.tensors(agent)[name]) for name, tensor in tensors.items())
        assert filled.versions("demo", agent) == [version]
        manifest = filled.manifest("demo", agent, version)
        assert manifest.content_hash == content_hash(bank.tensors(agent), bank.config(agent))
        assert version == f"v0001-{manifest.content_hash[:12]}"
        folder = filled.folder("demo", agent, version)
        assert sorted(p.name for p in folder.iterdir()) == [
            "README.md", "adapter_config.json", "adapter_model.safetensors", "manifest.json",
        ]  # fmt: skip
        assert manifest.files == {p.name: sha256(p.read_bytes()) for p in folder.iterdir() if p.name != "manifest.json"}


def test_numbers_go_up_and_old_versions_stay(filled: Registry, bank: Any, identity: Any, recipe: Any) -> None:
    first = filled.versions("demo", "planner")[0]
    before = {p: p.read_bytes() for p in filled.root.rglob("*") if p.is_file()}
    again = publish(filled, bank, identity, recipe)  # the very same content: still a version of its own
    other = publish(filled, bank, identity, recipe, scale=2.0)
    assert [again.number, other.number] == [2, 3]
    assert filled.versions("demo", "planner") == [first, again.version, other.version]
    assert all(path.read_bytes() == data for path, data in before.items())
    assert filled.team("demo").agents["planner"] == first  # publishing an adapter changes no team


def test_a_number_is_not_used_again(filled: Registry, bank: Any, identity: Any, recipe: Any) -> None:
    """Even where the highest version is gone: the name stays in a team that used it."""
    second = publish(filled, bank, identity, recipe, scale=2.0)
    agents = {**filled.team("demo").agents, "planner": second.version}
    filled.publish_team("demo", recipe, agents, identity=identity, made_by="swap")
    (filled.root / "demo" / "planner" / second.version).rename(filled.root / "elsewhere")
    assert publish(filled, bank, identity, recipe, scale=3.0).number == 3


def test_teams_are_append_only_and_undo_adds_one(filled: Registry, bank: Any, identity: Any, recipe: Any) -> None:
    old = filled.team("demo")
    new = publish(filled, bank, identity, recipe, scale=2.0)
    step = Replaced(agent="planner", old=old.agents["planner"], new=new.version, how="swap from a test")
    second = filled.publish_team(
        "demo", recipe, {**old.agents, "planner": new.version}, identity=identity, made_by="swap", parent=1, lineage=[step]
    )
    assert (second.number, second.parent, filled.team("demo").number) == (2, 1, 2)
    with pytest.raises(UserError, match="is at version 2 now, not 1"):
        filled.publish_team("demo", recipe, old.agents, identity=identity, made_by="swap", parent=1)
    third = filled.undo("demo")
    assert (third.number, third.parent, third.made_by) == (3, 2, "undo") and third.agents == old.agents
    assert [(s.agent, s.old, s.new) for s in third.lineage] == [("planner", new.version, old.agents["planner"])]
    assert filled.numbers("demo") == [1, 2, 3] and filled.team("demo", 2) == second
    with pytest.raises(UserError, match="no swap to undo, and version 1 is what train made"):  # not forth again
        filled.undo("demo")
    newer = publish(filled, bank, identity, recipe, scale=3.0)
    for version in (new.version, newer.version):
        filled.publish_team("demo", recipe, {**old.agents, "planner": version}, identity=identity, made_by="swap")
    assert filled.undo("demo").agents["planner"] == new.version
    assert filled.undo("demo").agents == old.agents
    filled.publish_team("demo", recipe, {**old.agents, "planner": newer.version}, identity=identity, made_by="import")
    with pytest.raises(UserError, match="no swap to undo, and version 8 is what import made"):
        filled.undo("demo")
    assert filled.team("demo").agents["planner"] == newer.version and not verify(filled).problems


def test_a_first_team_has_nothing_to_undo(filled: Registry) -> None:
    with pytest.raises(UserError, match="no swap to undo"):
        filled.undo("demo")
    assert filled.numbers("demo") == [1]


def test_a_team_takes_only_adapters_of_its_base_that_are_there(filled: Registry, bank: Any, identity: Any, recipe: Any) -> None:
    agents = filled.team("demo").agents
    other = Identity(BaseIdentity(source="nano", weights_hash="0" * 64), identity.tokenizer_hash)
    stranger = publish(filled, bank, other, recipe)
    with pytest.raises(UserError, match="belongs to the base"):
        filled.publish_team("demo", recipe, {**agents, "planner": stranger.version}, identity=identity, made_by="swap")
    tokens = publish(filled, bank, Identity(identity.base, "1" * 64), recipe)
    with pytest.raises(UserError, match="another tokenizer"):
        filled.publish_team("demo", recipe, {**agents, "planner": tokens.version}, identity=identity, made_by="swap")
    with pytest.raises(UserError, match="no such adapter version"):
        filled.publish_team("demo", recipe, {**agents, "planner": "v0099-0123456789ab"}, identity=identity, made_by="swap")
    doubled = recipe.with_loras({"planner": {**recipe.team.agents[0].lora.model_dump(), "alpha": 16.0}})
    with pytest.raises(UserError, match="has alpha 8.0, the recipe says 16.0"):  # it would be played at twice its scale
        filled.publish_team("demo", doubled, agents, identity=identity, made_by="swap")
    with pytest.raises(UserError, match="its agents are not the team's"):
        filled.publish_team("demo", recipe, {"planner": agents["planner"]}, identity=identity, made_by="swap")
    assert filled.numbers("demo") == [1]


def test_nothing_broken_is_published(filled: Registry, bank: Any, identity: Any, recipe: Any) -> None:
    before = sorted(filled.root.rglob("*"))
    with pytest.raises(UserError, match="NaN or infinity"):
        publish(filled, bank, identity, recipe, scale=float("nan"))
    for change, words in (({"r": 7}, "rank 7"), ({"use_dora": True}, "lacks its magnitude"), ({"bias": "all"}, "bias")):
        with pytest.raises(UserError, match=words):
            filled.publish_adapter(
                "demo", "planner", bank.tensors("planner"), {**bank.config("planner"), **change}, identity=identity,
                protocol_hash=protocol_hash(recipe.team), made_by="swap",
            )  # fmt: skip
    assert sorted(filled.root.rglob("*")) == before


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", ".tmp-x", "A", "a b", "ä", "a\n", "/etc", "a" * 33, "1a"])
def test_names_never_lead_out(filled: Registry, bank: Any, identity: Any, recipe: Any, name: str) -> None:
    outside = sorted(filled.root.parent.iterdir())
    version = filled.team("demo").agents["planner"]
    for call in (
        lambda: filled.team(name),
        lambda: filled.folder(name, "planner", version),
        lambda: filled.folder("demo", name, version),
        lambda: filled.folder("demo", "planner", name),
        lambda: filled.versions("demo", name),
        lambda: filled.remove(name),
        lambda: filled.publish_team(name, recipe, {}, identity=identity, made_by="train"),
        lambda: (
            publish(filled, bank, identity, recipe, agent=name) if name in bank.agents else filled.contents("demo", name, version)
        ),
    ):
        with pytest.raises(UserError):
            call()
    assert sorted(filled.root.parent.iterdir()) == outside


def test_links_are_not_followed(filled: Registry, tmp_path: Path) -> None:
    version = filled.team("demo").agents["planner"]
    folder = filled.folder("demo", "planner", version)
    (folder / "README.md").rename(tmp_path / "README.md")
    (folder / "README.md").symlink_to(tmp_path / "README.md")
    with pytest.raises(UserError, match="README.md: a link"):
        filled.contents("demo", "planner", version)
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    with pytest.raises(UserError, match="a link"):
        filled.contents("demo", "planner", version)
    (filled.root / "demo").rename(tmp_path / "demo")
    (filled.root / "demo").symlink_to(tmp_path / "demo")
    with pytest.raises(UserError, match="a link"):
        filled.team("demo")
    assert filled.teams() == []


def test_a_pipe_in_place_of_a_file_does_not_hang(filled: Registry) -> None:
    version = filled.team("demo").agents["planner"]
    file = filled.folder("demo", "planner", version) / "adapter_model.safetensors"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(UserError, match="not a plain file"):
        filled.contents("demo", "planner", version)


def test_removing(filled: Registry, bank: Any, identity: Any, recipe: Any) -> None:
    first = filled.team("demo").agents["planner"]
    with pytest.raises(UserError, match="used by team version 1"):
        filled.remove("demo", agent="planner", version=first)
    with pytest.raises(UserError, match="is the current team"):
        filled.remove("demo", agent="planner", version=first, with_teams=True)
    with pytest.raises(UserError, match="is the current team"):
        filled.remove("demo", number=1)
    unused = publish(filled, bank, identity, recipe, scale=2.0)
    assert filled.remove("demo", agent="planner", version=unused.version) == [f"demo/planner/{unused.version}"]
    second = publish(filled, bank, identity, recipe, scale=3.0)
    filled.publish_team(
        "demo", recipe, {**filled.team("demo").agents, "planner": second.version}, identity=identity, made_by="swap"
    )
    assert filled.remove("demo", agent="planner", version=first, with_teams=True) == [
        "demo/team-0001.json",
        f"demo/planner/{first}",
    ]
    assert filled.numbers("demo") == [2] and filled.versions("demo", "planner") == [second.version]
    assert not verify(filled).problems
    assert filled.remove("demo") == ["demo"]
    assert filled.teams() == [] and [p.name for p in filled.root.iterdir() if not p.name.startswith(".")] == []
    with pytest.raises(UserError, match="no team 'demo'"):
        filled.remove("demo")


def test_another_registrys_team_is_taken_over_bit_for_bit(
    filled: Registry, tmp_path: Path, bank: Any, identity: Any, recipe: Any
) -> None:
    there = Registry(tmp_path / "there")
    team_bytes = (filled.root / "demo" / "team-0001.json").read_bytes()
    with pytest.raises(UserError, match="no such adapter version"):
        there.adopt_team(team_bytes, "x")  # its adapters first
    contents = {agent: filled.contents("demo", agent, version) for agent, version in filled.team("demo").agents.items()}
    for _ in range(2):  # the second time changes nothing
        for agent, files in contents.items():
            there.adopt_adapter(files, agent)
        there.adopt_team(team_bytes, "team")
        assert not verify(there).problems

    def files_of(root: Path) -> dict[Path, bytes]:
        return {p.relative_to(root): p.read_bytes() for p in root.rglob("*") if p.is_file() and not p.name.endswith(".lock")}

    assert files_of(there.root) == files_of(filled.root)
    spoiled = {**contents["planner"], "README.md": b"# other\n"}
    with pytest.raises(UserError, match="README.md: does not match its hash"):
        Registry(tmp_path / "new").adopt_adapter(spoiled, "x")
    with pytest.raises(UserError, match="'evil.py' is missing or no file"):
        Registry(tmp_path / "new").adopt_adapter({**contents["planner"], "evil.py": b""}, "x")
    wide = {name: torch.ones(4, 7) if "q_proj.lora_A" in name else t for name, t in bank.tensors("planner").items()}
    stranger = Registry(tmp_path / "stranger")
    odd = stranger.publish_adapter(
        "demo", "planner", wide, bank.config("planner"), identity=identity, protocol_hash="0" * 64, made_by="train"
    )
    with pytest.raises(UserError, match="the base needs"):
        Registry(tmp_path / "new").adopt_adapter(stranger.contents("demo", "planner", odd.version), "x")
    assert any("the base needs" in str(problem) for problem in verify(stranger).problems)
    assert not (tmp_path / "new" / "demo").exists()
    mine = Registry(tmp_path / "mine")
    publish(mine, bank, identity, recipe, scale=5.0)  # another version 1
    with pytest.raises(UserError, match="has another version 1 in .*use another team name"):
        mine.adopt_adapter(contents["planner"], "x")


def test_a_team_file_that_was_altered_is_refused(filled: Registry) -> None:
    path = filled.root / "demo" / "team-0001.json"
    good = json.loads(path.read_text())
    for change, words in (
        ({"team": "other"}, "is about other"),
        ({"number": 2, "parent": 1}, "is about demo team-0002.json"),
        ({"parent": 1}, "not older"),
        ({"extra": 1}, "Extra inputs"),
        ({"agents": {"planner": "../../etc"}}, "pattern"),
        ({"agents": {"../x": good["agents"]["planner"]}}, "pattern"),
        ({"format": 2}, "format"),
        ({"metrics": {"a": "1"}}, "metrics"),
        ({"created": "yesterday\u001b[31m"}, "created"),
    ):
        path.write_text(json.dumps({**good, **change, "manifest_hash": own_hash(good | change)}))
        with pytest.raises(UserError, match=words) as caught:
            filled.team("demo")
        assert "\n" not in str(caught.value) and "\x1b" not in str(caught.value)
    for depth in (80, 300, 700):  # JSON takes it; what reads it later would run out of stack
        path.write_text(json.dumps(good).replace('"seed": 0', '"seed": ' + '{"a":' * depth + "0" + "}" * depth))
        with pytest.raises(UserError, match="nested too deep"):
            filled.team("demo")
    path.write_text(json.dumps(good).replace('"seed": 0', '"seed": 1e999'))
    with pytest.raises(UserError, match="a number is too large"):
        filled.team("demo")
    path.write_text(path.read_text().replace("{", '{"team": "demo",', 1))
    with pytest.raises(UserError, match="appears twice"):
        filled.team("demo")
