"""What RUN_OR_TEAM means, and the `adapters` commands as a user types them."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from teamtr_lora.base import source
from teamtr_lora.base.frozen_base import base_identity
from teamtr_lora.base.source import resolve
from teamtr_lora.cli import main
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import dump_json
from teamtr_lora.evaluation.commands import ask_team
from teamtr_lora.recipe import AgentSection, ProtocolSection, Recipe, RouterSection, TeamSection
from teamtr_lora.recipe.named import named_code
from teamtr_lora.recipe.problems import check
from teamtr_lora.registry.identity import protocol_hash, tokenizer_hash
from teamtr_lora.registry.manifest import own_hash
from teamtr_lora.registry.pushed_files import agent_parcel, team_parcel
from teamtr_lora.registry.registry_store import Registry
from teamtr_lora.registry.stored import Location, find_team, locate
from teamtr_lora.registry.verify import verify
from teamtr_lora.rollout.playable import load_versions, open_team
from teamtr_lora.rollout.serve import Launch, ServedTeam, ServeOptions, plan_launch

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(filled: Registry, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line, from the folder that holds adapters/."""
    monkeypatch.chdir(filled.root.parent)

    def call(*argv: str) -> tuple[int, str, str]:
        code = main(list(argv))
        out, err = capsys.readouterr()
        return code, out, err

    return call


def launch_demo() -> Launch:
    """What `serve demo` starts."""
    team = find_team(Path("demo"), scored=False)
    return plan_launch(ServedTeam(Path("demo"), team.recipe, team.versions, team.adapters), ServeOptions())


def test_a_team_is_found_by_folder_file_and_name(filled: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = [
        find_team(Path(name)) for name in ("demo", "adapters/demo", "adapters/demo/team-0001.json", str(filled.root / "demo"))
    ]
    wanted = filled.team("demo")
    for stored in found:
        assert {agent: version.name for agent, version in stored.versions.items()} == wanted.agents
        assert stored.recipe == wanted.load_recipe() and stored.adapters.resolve() == (filled.root / "demo").resolve()
        assert not stored.evaluations.resolve().is_relative_to(filled.root.resolve())  # results never go into the registry
    monkeypatch.chdir(filled.root / "demo")
    assert find_team(Path(".")).versions == found[0].versions
    for name in ("dem", "adapters", "adapters/none", "../adapters", "/"):
        with pytest.raises(UserError, match="no run or team here"):
            find_team(Path(name))
    with pytest.raises(UserError, match="no run or team here"):
        find_team(Path("a" * 5000))


def test_an_older_version_is_opened_by_its_file(filled: Registry, tmp_path: Path, bank: Any, identity: Any, recipe: Any) -> None:
    tensors = {name: tensor * 2 for name, tensor in bank.tensors("planner").items()}
    new = filled.publish_adapter(
        "demo", "planner", tensors, bank.config("planner"), identity=identity, protocol_hash="0" * 64, made_by="swap"
    )
    first = filled.team("demo").agents
    filled.publish_team("demo", recipe, {**first, "planner": new.version}, identity=identity, made_by="swap")
    assert find_team(filled.root / "demo").versions["planner"].name == new.version
    assert find_team(filled.root / "demo" / "team-0001.json").versions["planner"].name == first["planner"]


def test_a_stored_team_plays_with_its_own_weights(filled: Registry, bank: Any) -> None:
    stored = find_team(filled.root / "demo")
    recipe = stored.recipe
    playable = open_team(recipe.base, recipe.team, recipe.rollout, seed=1, folder=recipe.folder)
    load_versions(playable, stored.versions, stored.adapters)
    for agent in bank.agents:
        got = playable.bank.tensors(agent)
        assert all((got[name] == tensor).all() for name, tensor in bank.tensors(agent).items())
    playable.close()


def test_only_a_bare_name_is_looked_up_in_the_registry(filled: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here, other = Location("team", filled.root.resolve(), "demo"), tmp_path / "other"
    shutil.copytree(filled.root, other)
    assert locate("demo") == Location("team", Path("adapters"), "demo")
    assert locate("demo", other) == Location("team", other, "demo")
    assert locate("adapters/demo", other) == here
    shutil.copytree(filled.root / "demo", tmp_path / "demo")
    assert locate("demo", other) == Location("team", tmp_path, "demo"), "what is here is meant"
    with pytest.raises(UserError, match="runs/demo: no run or team here"):
        locate("runs/demo", other)
    with pytest.raises(UserError, match="deno: no run or team here; .*; did you mean 'demo'?"):
        locate("deno", other)


def test_serve_takes_a_stored_team(filled: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    launch = launch_demo()
    modules = [json.loads(word) for word in launch.command if word.startswith('{"name"')]
    assert {m["name"]: Path(m["path"]) for m in modules} == {
        agent: filled.folder("demo", agent, version).resolve() for agent, version in filled.team("demo").agents.items()
    }


def test_another_base_under_the_same_name_is_refused(filled: Registry, tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teamtr_lora.registry.identity.resolve", lambda *_: tiny_base)
    with pytest.raises(UserError, match="made for other weights than 'nano' has now"):
        find_team(filled.root / "demo")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"base": {"source": "nano", "revision": None, "weights_hash": "0" * 64}}, "belongs to the base"),
        ({"tokenizer_hash": "0" * 64}, "another tokenizer"),
        ({"base": {"source": "nano2", "revision": None}}, "names the base 'nano2', the team names 'nano'"),
    ],
    ids=["weights", "tokenizer", "name"],
)
def test_a_team_whose_identities_disagree_is_neither_opened_nor_pushed(
    filled: Registry, change: dict[str, Any], words: str
) -> None:
    team = filled.team("demo")
    path = filled.folder("demo", "checker", team.agents["checker"]) / "manifest.json"
    data = json.loads(path.read_text())
    data |= change | ({"base": data["base"] | change["base"]} if "base" in change else {})
    path.write_text(dump_json(data | {"manifest_hash": own_hash(data)}))
    for use in (
        lambda: find_team(filled.root / "demo"),
        lambda: team_parcel(filled, team, "alice/team"),
        lambda: agent_parcel(filled, team, "planner", "alice/planner"),
    ):
        with pytest.raises(UserError, match=words):
            use()


def test_code_that_a_recipe_names_must_be_here(filled: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger's team cannot pick a function out of what is installed."""
    path = filled.root / "demo" / "team-0001.json"
    data = json.loads(path.read_text())
    monkeypatch.chdir(tmp_path)

    def forge() -> None:
        """Every hash fits."""
        recipe = check(data["recipe"])[0]
        assert recipe is not None
        data["protocol_hash"] = protocol_hash(recipe.team)
        path.write_text(dump_json(data | {"manifest_hash": own_hash(data)}))

    why = {
        "os:system": "os is part of Python itself",
        "numpy.testing:run_module_suite": "numpy is an installed package",
        "router:speak": "cannot import it: there is no router.py beside",
    }
    for named, words in why.items():
        data["recipe"]["team"]["router"] |= {"kind": "custom", "callable": named}
        forge()
        with pytest.raises(UserError, match=f"team.router.callable = '{named}': {words}"):
            find_team(filled.root / "demo")
    (tmp_path / "router.py").write_text("def speak(messages, agents):\n    return None\n")
    assert find_team(filled.root / "demo").recipe.team.router.callable == "router:speak"
    data["recipe"]["team"]["router"] = {}
    data["recipe"]["task"] = {"name": "dataset", "path": "x.jsonl", "reward": ["torch.hub:load"]}
    forge()
    with pytest.raises(UserError, match=r"task.reward.0 = 'torch.hub:load': torch is an installed package"):
        find_team(filled.root / "demo")
    monkeypatch.setenv("TEAMTR_LORA_TRUST", "torch")
    assert find_team(filled.root / "demo").recipe.task.name == "dataset", "the user's own choice"


def test_talking_to_a_team_takes_neither_its_reward_nor_its_dataset(
    filled: Registry, recipe: Any, identity: Any, run: Run, tmp_path: Path
) -> None:
    """Nor is a reward file opened that happens to lie here. What a custom router needs, it needs for talking too."""

    def publish(router: dict[str, str]) -> None:
        team = recipe.team.model_dump() | {"router": router}
        task = {"name": "dataset", "path": "gone.jsonl", "reward": "rewards:right"}
        made = Recipe.model_validate(recipe.model_dump() | {"task": task, "team": team, "rollout": {"max_message_tokens": 2}})
        filled.publish_team("demo", made, filled.team("demo").agents, identity=identity, made_by="swap")

    publish({})
    for _ in range(2):
        code, out, error = run("ask", "demo", "47+38", "--json")
        assert code == 0, error
        assert [message["agent"] for message in json.loads(out)["messages"]] == ["planner", "checker"]
        assert ask_team("demo", "47+38").prompt == "47+38" and launch_demo().command
        (tmp_path / "rewards.py").write_text("raise RuntimeError('opened')\n")
    (tmp_path / "rewards.py").unlink()
    for command in (("eval", "demo"), ("swap", "demo", "--agent", "planner", "--with", "fresh:rank=2", "--direct")):
        code, _, error = run(*command)
        assert code == 2 and "task.reward = 'rewards:right': cannot import it: there is no rewards.py" in error
    publish({"kind": "custom", "callable": "router:speak"})
    code, _, error = run("ask", "demo", "47+38")
    assert code == 2 and "team.router.callable = 'router:speak': cannot import it: there is no router.py" in error


@pytest.mark.parametrize(
    "task", [{"name": "zebralogic"}, {"name": "zebra", "reward": "cells"}, {"name": "arbench_sp", "path": "items.jsonl"}]
)
def test_a_tasks_own_reward_is_no_code_to_supply(filled: Registry, recipe: Any, identity: Any, task: dict[str, str]) -> None:
    made = Recipe.model_validate(recipe.model_dump() | {"task": task})
    filled.publish_team("demo", made, filled.team("demo").agents, identity=identity, made_by="swap")
    assert find_team(filled.root / "demo").recipe == made and named_code(made.model_dump()) == {}


def test_list_show_and_verify(run: Run, filled: Registry) -> None:
    code, out, _ = run("adapters", "list")
    assert code == 0 and out.splitlines()[1].split()[:5] == ["demo", "1", "nano", "column_sum", "checker,planner"]
    assert json.loads(run("adapters", "list", "--json")[1])[0]["agents"] == filled.team("demo").agents
    code, out, _ = run("adapters", "show", "demo")
    assert code == 0 and filled.team("demo").base.weights_hash in out and "avg_at_k" in out
    version = filled.team("demo").agents["planner"]
    shown = json.loads(run("adapters", "show", "demo", "--agent", "planner", "--version", version, "--json")[1])
    assert shown["used_by"] == [1] and shown["content_hash"].startswith(version[-12:])
    assert version in run("adapters", "show", "demo", "--agent", "planner")[1]
    assert run("adapters", "show", "demo/planner") == run("adapters", "show", "demo", "--agent", "planner")
    assert run("adapters", "verify") == (0, "2 adapter versions and 1 team versions: every hash fits\n", "")
    (filled.folder("demo", "planner", version) / "README.md").write_text("x")
    code, out, _ = run("adapters", "verify", "demo")
    assert code == 2 and out.startswith(f"adapters/demo/planner/{version}") and out.endswith("problems\n")
    code, out, _ = run("adapters", "verify", "--json")
    assert code == 2 and json.loads(out)["ok"] is False and len(json.loads(out)["problems"]) == 2
    code, out, _ = run("adapters", "list", "--registry", "nowhere")
    assert code == 0 and "no teams" in out


def test_mistakes_on_the_command_line(run: Run, filled: Registry, tmp_path: Path) -> None:
    version = filled.team("demo").agents["planner"]
    for argv, words in (
        (["show", "dmo"], "did you mean 'demo'?"),
        (["show", "demo", "--number", "7"], "no team version 7"),
        (["show", "demo", "--agent", "nobody"], "no agent 'nobody'"),
        (["show", "demo", "--version", version], "say whose"),
        (["show", "../x"], "must be a safe file name"),
        (["show", "demo/../x"], "must be a safe file name"),
        (["show", "demo/nobody"], "no agent 'nobody'"),
        (["verify", "none"], "no team 'none'"),
        (["rm", "demo"], "give --agent NAME --version VERSION"),
        (["rm", "demo", "--all", "--number", "1"], "give --agent"),
        (["rm", "demo", "--agent", "planner"], "give --agent"),
        (["rm", "demo", "--agent", "planner", "--version", version], "used by team version 1"),
        (["rm", "none", "--all"], "no team 'none'"),
        (["import", "nowhere", "--team", "x"], "no such folder"),
        (["import", ".", "--team", "x"], "no run and no PEFT adapter"),
        (["import", "adapters/demo/planner", "--team", "x"], f"adapters in it: give 'adapters/demo/planner/{version}'"),
    ):
        code, out, err = run("adapters", *argv)
        assert (code, out) == (2, "") and words in err and err.count("\n") == 1, (argv, err)
    assert verify(filled).problems == []
    assert run("adapters", "rm", "demo", "--all") == (0, "removed demo\n", "")
    assert not (filled.root / "demo").exists() and not (tmp_path / "none").exists()


def test_removing_what_is_not_there_leaves_nothing(run: Run, filled: Registry, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    for root in (filled.root, tmp_path / "nowhere"):
        code, _, error = run("adapters", "rm", "nobody", "--all", "--registry", str(root))
        assert code == 2 and "no team 'nobody' here" in error
    assert sorted(tmp_path.rglob("*")) == before


def test_the_hash_of_a_large_file_is_kept_for_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEAMTR_LORA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(source, "_LARGE_FILE", 1)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    first = base_identity(tmp_path)["weights_sha256"]
    source._sha256.cache_clear()  # another process
    with monkeypatch.context() as patch:
        patch.setattr("hashlib.file_digest", lambda *_: pytest.fail("the file was read again"))
        assert base_identity(tmp_path)["weights_sha256"] == first
    (tmp_path / "model.safetensors").write_bytes(b"other..")
    assert base_identity(tmp_path)["weights_sha256"] != first


def test_identities_follow_what_matters(nano: Any, recipe: Any) -> None:
    folder = resolve("nano")
    assert base_identity(folder)["weights_sha256"] == base_identity(folder)["weights_sha256"]
    first = tokenizer_hash(nano.tokenizer)
    tokenizer = copy.deepcopy(nano.tokenizer)
    assert tokenizer_hash(tokenizer) == first
    tokenizer.chat_template += " "
    assert tokenizer_hash(tokenizer) != first
    tokenizer = copy.deepcopy(nano.tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<new>"})
    assert tokenizer_hash(tokenizer) != first

    def team(**changes: Any) -> TeamSection:
        agents = [AgentSection(name="a", role="r"), AgentSection(name="b")]
        return TeamSection(**({"agents": agents, "protocol": ProtocolSection(), "router": RouterSection()} | changes))

    hashes = [
        protocol_hash(t)
        for t in (
            team(),
            team(protocol=ProtocolSection(system="x")),
            team(router=RouterSection(rounds=2)),
            team(agents=[AgentSection(name="b"), AgentSection(name="a", role="r")]),
            team(agents=[AgentSection(name="a", role="s"), AgentSection(name="b")]),
        )
    ]
    assert len(set(hashes)) == 5
    assert protocol_hash(team(router=RouterSection(done_marker="FINAL:"))) == hashes[0]  # a default written out is no change
