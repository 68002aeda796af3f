"""Whole swaps of a small trained team, through the command line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.trainer_callback import TrainerCallback

from teamtr_lora.base.versions import CONFIG, WEIGHTS, read_adapter_folder
from teamtr_lora.cli import main
from teamtr_lora.recipe import load_recipe
from teamtr_lora.registry.identity import identify
from teamtr_lora.registry.imports import import_path
from teamtr_lora.registry.registry_store import Registry
from teamtr_lora.registry.verify import verify
from teamtr_lora.runs.metrics import StageRow, SwapRow, read_rows
from teamtr_lora.runs.run_dir import RunDir
from teamtr_lora.runs.stored_run import read_run
from teamtr_lora.swap.places import RegistryPlace
from teamtr_lora.training.trainer import TeamTRTrainer

RADIUS = ["--delta-align", "0.2"]
FRESH = ["--agent", "left", "--with", "fresh:rank=8,targets=all-linear"]


def swap(run: Path, *options: str) -> int:
    return main(["swap", str(run), *options, "--json", "--registry", str(run.parent / "no-registry")])


def swapped(run: Path, capsys: Any, *options: str) -> dict[str, Any]:
    assert swap(run, *options) == 0
    return json.loads(capsys.readouterr().out)


def test_a_fresh_adapter_learns_the_old_policy_and_takes_its_place(run: Path, capsys: Any) -> None:
    before = read_run(run).versions
    report = swapped(run, capsys, *FRESH, *RADIUS)
    alignment = report["alignment"]
    assert alignment["before"]["mean"] > 0.3, "the old agent is no fresh adapter, or there would be nothing to learn"
    assert alignment["reached"] and alignment["after"]["mean"] <= 0.2
    stored = read_run(run)
    recipe, after = stored.recipe, stored.versions
    lora = {agent.name: agent.lora for agent in recipe.team.agents}["left"]
    assert (lora.rank, lora.targets) == (8, "all-linear")
    assert lora.alpha == pytest.approx(8 * 2**0.5), "an optimizer's step moves the policy as far as with the old rank 4, alpha 8"
    assert after["right"] == before["right"]
    assert after["left"].number == before["left"].number + 1 and after["left"].name == report["new"]
    tensors, config = read_adapter_folder(run / "adapters" / "left" / report["new"])
    assert config["r"] == 8 and all(8 in tensor.shape for tensor in tensors.values())
    assert [c["verdict"] for c in report["checks"]] == ["ok"] * len(report["checks"])
    assert report["sampled_tokens"] > 16 and report["trained_tokens"] > 0
    row = read_rows(run)[-1]
    assert isinstance(row, SwapRow) and (row.old, row.new) == (before["left"].name, report["new"])
    assert row.kl_after is not None and row.kl_after.mean == alignment["after"]["mean"]
    assert not (run / ".swap").exists()

    stage = next(row for row in reversed(read_rows(run)) if isinstance(row, StageRow))
    assert stage.evaluation is not None
    assert '"by_item"' not in json.dumps(report) and len(stage.evaluation["by_item"]) == stage.evaluation["items"] > 1
    assert report["before"]["evaluation"]["mean_reward"] == stage.evaluation["mean_reward"], "the same items and seeds"
    assert report["shock_direct"]["lost"] == pytest.approx(report["before"]["accuracy"] - report["direct"]["accuracy"])
    assert report["shock_aligned"]["lost"] == pytest.approx(report["before"]["accuracy"] - report["aligned"]["accuracy"])


def test_settings_of_the_swap_section_are_taken_and_no_others(run: Path, capsys: Any) -> None:
    plan = swapped(run, capsys, *FRESH, *RADIUS, "--dry-run", "swap.align_steps=7", "swap.probe_contexts=24")["plan"]
    assert "in 24 contexts" in plan[0] and "at most 7 steps" in plan[1]
    for word, said in (("training.stages=3", "swap.KEY=value"), ("swap.align_step=7", "did you mean"), ("swap.x", "swap.x")):
        assert swap(run, *FRESH, "--dry-run", word) == 2 and said in capsys.readouterr().err


def test_eval_and_training_go_on_with_the_new_team(run: Path, recipe_file: Path, capsys: Any) -> None:
    direct = swapped(run, capsys, *FRESH, "--direct")
    played = sum(direct[side]["evaluation"]["sampled_tokens"] for side in ("before", "direct"))
    assert direct["sampled_tokens"] == played, "nothing is learned, so no probe is played"
    _, optimizers = RunDir(run).checkpoints.load()
    assert set(optimizers) == {"right"}, "the swapped agent's optimizer starts fresh"
    # with the recipe as the user has it, which still names the old adapter, and with the run directory itself
    assert main(["train", str(recipe_file), "training.stages=2", "--run-dir", str(run), "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stages"] == 2
    assert main(["train", str(run), "training.stages=3", "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stages"] == 3
    stored = read_run(run)
    recipe, versions = stored.recipe, stored.versions
    assert {a.name: a.lora.rank for a in recipe.team.agents} == {"left": 8, "right": 2} and versions["left"].number > 2
    assert load_recipe(run / "recipe.yaml").team.agents[0].lora.rank == 8
    # a lora that the agent never had is still another run
    assert main(["train", str(recipe_file), "team.agents.left.lora.rank=3", "--run-dir", str(run), "--resume"]) == 2
    assert "lora.rank is 8 there and 3 here" in capsys.readouterr().err
    assert main(["certify", str(run), "--json"]) == 0
    certificates = json.loads(capsys.readouterr().out)
    assert [s["stage"] for s in certificates["stages"]] == [1, 2, 3]
    (replaced,) = certificates["replacements"]
    assert replaced["after_stage"] == 1 and replaced["agent"] == "left" and replaced["how"] == "direct"
    assert certificates["calibration"]["rows"] == 2, "stage 1 was another team's"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kinds = [row["kind"] for row in rows]
    after_swap = rows[kinds.index("swap")]["evaluation"]["mean_reward"]
    second = next(row for row in rows if row["kind"] == "stage" and row["stage"] == 2)
    assert certificates["stages"][1]["improvement"] == pytest.approx(second["evaluation"]["mean_reward"] - after_swap)


def test_undo_restores_the_team_the_recipe_and_the_policy(run: Path, recipe_file: Path, capsys: Any) -> None:
    before = read_run(run)
    swapped(run, capsys, *FRESH, "--direct")
    swapped(run, capsys, "--agent", "right", "--with", "fresh:rank=3", "--direct")
    assert {a.name: a.lora.rank for a in read_run(run).recipe.team.agents} == {"left": 8, "right": 3}
    assert swap(run, "--undo") == 0
    assert {a.name: a.lora.rank for a in read_run(run).recipe.team.agents} == {"left": 8, "right": 2}
    assert swap(run, "--undo") == 0
    capsys.readouterr()
    assert read_run(run) == before and load_recipe(run / "recipe.yaml") == before.recipe
    assert swap(run, "--undo") == 2
    assert "no swap to undo" in capsys.readouterr().err
    assert main(["train", str(recipe_file), "training.stages=2", "--run-dir", str(run), "--resume", "--json"]) == 0


def test_dry_run_and_failures_change_nothing(run: Path, files: Callable[[Path], dict[str, bytes]], capsys: Any) -> None:
    before = files(run)
    assert swap(run, *FRESH, "--dry-run") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["new"] is None and any("replace" in step for step in report["plan"])
    assert swap(run, *FRESH, "--delta-align", "1e-9") == 2
    error = capsys.readouterr().err
    assert "outside delta_align = 1e-09" in error and "--direct" in error
    assert swap(run, "--agent", "left", "--with", "fresh:rank=65") == 2
    assert "use at most 32" in capsys.readouterr().err
    assert swap(run, "--agent", "left", "--with", "fresh:targets=lm_head") == 2
    assert "'lm_head' is no linear layer" in capsys.readouterr().err
    assert swap(run, "--agent", "lef", "--with", "fresh") == 2
    assert "did you mean 'left'?" in capsys.readouterr().err
    for wrong in ("fresh:rnak=3", "fresh:rank=x", "fresh:rank=0", "fresh:rank", "../nowhere/at/all"):
        assert swap(run, "--agent", "left", "--with", wrong) == 2
        assert "--with" in capsys.readouterr().err
    assert files(run) == before


def test_a_folder_from_elsewhere_is_checked_before_it_is_used(run: Path, tmp_path: Path, capsys: Any) -> None:
    version = read_run(run).versions["left"].name
    folder = tmp_path / "peft"
    tensors, config = read_adapter_folder(run / "adapters" / "left" / version)
    config["base_model_name_or_path"] = "somebody/elses-name"

    def write(changed: dict[str, torch.Tensor], **other: Any) -> None:
        folder.mkdir(exist_ok=True)
        (folder / CONFIG).write_text(json.dumps(config | other))
        save_file({name: tensor.contiguous() for name, tensor in changed.items()}, folder / WEIGHTS)

    name, wide = next(iter(tensors)), next(name for name in tensors if "lora_A" in name)
    for changed, words in (
        ({**tensors, name: torch.full_like(tensors[name], torch.nan)}, "NaN"),
        ({**tensors, wide: tensors[wide][:, :-1]}, "is it for another base?"),
    ):
        write(changed)
        assert swap(run, "--agent", "left", "--with", str(folder)) == 2
        assert words in capsys.readouterr().err
    write(tensors, bias="all")
    assert swap(run, "--agent", "left", "--with", str(folder)) == 2
    assert "bias" in capsys.readouterr().err
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04.")
    assert swap(run, "--agent", "left", "--with", str(folder)) == 2
    assert "pickle" in capsys.readouterr().err
    write(tensors)
    assert swap(run, "--agent", "left", "--with", str(folder)) == 2, "nor is it let in beside safetensors"
    assert "'adapter_model.bin' is a pickle" in capsys.readouterr().err
    (folder / "adapter_model.bin").unlink()
    # the same weights come back as the same policy: nothing to align, nothing lost
    report = swapped(run, capsys, "--agent", "left", "--with", str(folder))
    assert report["alignment"]["before"]["mean"] == pytest.approx(0, abs=1e-9) and report["alignment"]["steps"] == 0
    assert report["shock_direct"] == {"lost": 0.0, "standard_error": 0.0}
    assert {c["check"]: c["verdict"] for c in report["checks"]}["base"] == "note"
    # and a version that the agent had before is named by itself
    first = next(path.name for path in (run / "adapters" / "left").iterdir() if path.name.startswith("v0000"))
    assert swap(run, "--agent", "left", "--with", "v0000-000000000000") == 2
    assert f"it has {first}, v0001-" in capsys.readouterr().err
    swapped(run, capsys, "--agent", "left", "--with", first, "--direct")
    assert read_run(run).versions["left"].content_hash.startswith(first.partition("-")[2])


def test_a_tokenizer_of_its_own_must_give_the_same_ids(run: Path, tmp_path: Path, tiny_base: Path, capsys: Any) -> None:
    version = read_run(run).versions["left"].name
    folder = tmp_path / "peft"
    folder.mkdir()
    for name in (CONFIG, WEIGHTS):
        (folder / name).write_bytes((run / "adapters" / "left" / version / name).read_bytes())
    tokenizer = json.loads((tiny_base / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    report = swapped(run, capsys, "--agent", "left", "--with", str(folder), "--direct")
    compared = {c["check"]: c for c in report["checks"]}["token ids"]
    assert compared["verdict"] == "ok" and int(compared["old"].split()[0]) >= 1000
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["i"], vocabulary["t"] = vocabulary["t"], vocabulary["i"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert swap(run, "--agent", "left", "--with", str(folder), "--direct") == 2
    assert "the tokenizers differ on" in capsys.readouterr().err


def test_the_protocol_must_be_unified(run: Path, capsys: Any) -> None:
    text = (run / "recipe.yaml").read_text().replace("system: Say something.", "system: null")
    (run / "recipe.yaml").write_text(text)
    assert swap(run, *FRESH, "--dry-run") == 2
    assert "set team.protocol.system" in capsys.readouterr().err
    (run / "recipe.yaml").write_text(text.replace("require_protocol: true", "require_protocol: false"))
    assert swap(run, *FRESH, "--dry-run") == 0
    assert {c["check"]: c["verdict"] for c in json.loads(capsys.readouterr().out)["checks"]}["system text"] == "note"


def test_a_registry_team_gets_a_new_version_and_an_undo(
    run: Path, tmp_path: Path, recipe_file: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(tmp_path / "registry")
    monkeypatch.chdir(recipe_file.parent)  # a registry's recipe finds the user's own reward function where the command is run
    import_path(registry, run, team="pair")
    team = tmp_path / "registry" / "pair"
    old = registry.versions("pair", "left")

    def killed(*_: Any, **__: Any) -> None:
        raise SystemExit("killed")

    with monkeypatch.context() as patch:
        patch.setattr(Registry, "publish_team", killed)
        with pytest.raises(SystemExit):
            main(["swap", str(team), *FRESH, "--direct", "--json"])
    assert verify(registry).problems == [] and registry.team("pair").number == 1, "the adapter is there, the team is the old one"
    capsys.readouterr()
    assert main(["swap", str(team), *FRESH, "--direct", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert registry.versions("pair", "left") == [*old, report["new"]], "the adapter that was published before the kill"
    now = registry.team("pair")
    assert now.number == 2 and now.parent == 1 and now.agents["left"] == report["new"]
    (step,) = now.lineage
    assert (step.agent, step.old, step.new) == ("left", report["old"], report["new"]) and "fresh:rank=8" in step.how
    assert registry.manifest("pair", "left", report["new"]).made_by == "swap"
    assert now.load_recipe().team.agents[0].lora.rank == 8
    # what was altered on disk is not taken, and a link in the place of the work folder is not followed
    weights = registry.folder("pair", "left", old[0]) / "adapter_model.safetensors"
    kept = weights.read_bytes()
    weights.write_bytes(kept[:-4] + b"\x00\x00\x80\x3f")
    assert main(["swap", str(team), "--agent", "left", "--with", old[0], "--direct"]) == 2
    assert "altered" in capsys.readouterr().err
    weights.write_bytes(kept)
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "request.json").write_text("{}")
    link = tmp_path / "registry" / ".pair.swap"
    link.symlink_to(victim)
    assert main(["swap", str(team), *FRESH, "--direct"]) == 2 and (victim / "request.json").exists()
    link.unlink()
    # an agent of one team may take a place in another
    spec = ["--registry", str(tmp_path / "registry"), "--agent", "left", "--with", "pair/left", "--direct"]
    assert main(["swap", str(run), *spec, "--json"]) == 0
    assert read_run(run).recipe.team.agents[0].lora.rank == 8
    assert main(["swap", str(team), "--undo", "--json"]) == 0
    assert registry.team("pair").agents == registry.team("pair", 1).agents
    assert verify(registry).problems == []


def test_a_swapped_run_keeps_its_lineage_in_the_registry(
    run: Path, tmp_path: Path, recipe_file: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(tmp_path / "registry")
    report = swapped(run, capsys, *FRESH, "--direct")
    team = import_path(registry, run, team="pair").team
    assert team is not None and team.made_by == "train"
    made = {agent: registry.manifest("pair", agent, version) for agent, version in team.agents.items()}
    assert {agent: manifest.made_by for agent, manifest in made.items()} == {"left": "swap", "right": "train"}
    (step,) = team.lineage
    assert (step.agent, step.old, step.new) == ("left", report["old"], team.agents["left"]) and FRESH[-1] in step.how
    assert team.metrics["mean_reward"] == report["direct"]["evaluation"]["mean_reward"]
    assert swap(run, "--undo") == 0
    capsys.readouterr()
    before = import_path(registry, run, team="pair").team
    assert before is not None and before.lineage == [] and not verify(registry).problems
    assert registry.manifest("pair", "left", before.agents["left"]).made_by == "train"
    assert before.metrics["mean_reward"] == report["before"]["evaluation"]["mean_reward"], "not that of the swap"
    # an import is no swap: nothing is taken back
    monkeypatch.chdir(recipe_file.parent)
    assert main(["swap", str(tmp_path / "registry" / "pair"), "--undo"]) == 2
    assert "no swap to undo" in capsys.readouterr().err and registry.team("pair") == before


def test_a_team_published_meanwhile_makes_the_swap_fail(
    run: Path, tmp_path: Path, recipe_file: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(tmp_path / "registry")
    monkeypatch.chdir(recipe_file.parent)
    import_path(registry, run, team="pair")
    real = RegistryPlace.commit

    def late(place: Any, replacement: Any) -> Any:
        before = registry.team("pair")
        identity = identify(before.base.source, before.base.revision)
        other = registry.publish_adapter(
            "pair", "right", *read_adapter_folder(registry.folder("pair", "right", before.agents["right"])), identity=identity,
            protocol_hash=before.protocol_hash, made_by="import",
        )  # fmt: skip
        registry.publish_team(
            "pair", before.load_recipe(), {**before.agents, "right": other.version}, identity=identity, made_by="import"
        )
        return real(place, replacement)

    monkeypatch.setattr(RegistryPlace, "commit", late)
    assert main(["swap", str(tmp_path / "registry" / "pair"), *FRESH, "--direct"]) == 2
    assert "meanwhile" in capsys.readouterr().err
    assert registry.team("pair").number == 2 and len(registry.versions("pair", "left")) == 1


def test_killed_at_any_moment_the_same_command_ends_the_same(
    run: Path, trained: Path, tmp_path: Path, killable: Any, without_times: Callable[[Any], Any]
) -> None:
    """SIGKILL as soon as each part of the work is there; after every kill the old team or the new one can be opened."""
    undisturbed = Path(shutil.copytree(trained, tmp_path / "undisturbed"))
    out = tmp_path / "out.json"
    reference = killable(["swap", str(undisturbed), *FRESH, *RADIUS, "--json"], out).result()
    command = ["swap", str(run), *FRESH, *RADIUS, "--json"]
    old, new, kills = read_run(run), read_run(undisturbed), 0
    for part in ("probe.json", "direct.json", "stage0-*", "report.json"):
        kills += killable(command, out).kill_when(lambda part=part: any((run / ".swap").glob(part)))
        assert read_run(run) in (old, new)
    assert kills >= 3, "the swap was over before it could be killed"
    if (run / ".swap").exists():
        assert without_times(killable(command, out).result()) == without_times(reference)
    assert read_run(run) == new
    assert not (run / ".swap").exists() and not list(run.rglob(".tmp-*"))
    assert [type(row).__name__ for row in read_rows(run)].count("SwapRow") == 1


def test_killed_between_the_checkpoint_and_team_json_the_swap_is_completed(run: Path, capsys: Any, monkeypatch: Any) -> None:
    old = read_run(run)

    def killed(*_: Any) -> None:
        raise SystemExit("killed")

    with monkeypatch.context() as patch:
        patch.setattr(RunDir, "write_team", killed)
        with pytest.raises(SystemExit):
            swap(run, *FRESH, "--direct")
    assert read_run(run) == old, "readers see the old team, whole"
    capsys.readouterr()
    report = swapped(run, capsys, *FRESH, "--direct")
    assert read_run(run).versions["left"].name == report["new"] and read_run(run).recipe.team.agents[0].lora.rank == 8
    assert len(RunDir(run).checkpoints.state().swaps) == 1


def test_a_stage_in_progress_begins_anew(recipe_file: Path, tmp_path: Path, capsys: Any) -> None:
    run = tmp_path / "run"

    class StopAfterOne(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = True

    TeamTRTrainer.from_recipe(load_recipe(recipe_file, [f"output_dir={run}"]), callbacks=[StopAfterOne()]).train()
    assert RunDir(run).checkpoints.state().update == 1
    capsys.readouterr()
    swapped(run, capsys, "--agent", "right", "--with", "fresh:rank=3", "--direct")
    assert main(["train", str(recipe_file), "--run-dir", str(run), "--resume", "--json"]) == 0
    capsys.readouterr()
    assert main(["certify", str(run), "--json"]) == 0
    (stage,) = json.loads(capsys.readouterr().out)["stages"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    after = rows[[row["kind"] for row in rows].index("swap") + 1 :]
    own = [row["certificate"]["surrogate"] for row in after if row["kind"] == "update" and row["certificate"]]
    assert [row["agent"] for row in after if row["kind"] == "update"] == ["left", "right"]
    assert stage["certificate"]["surrogate"] == pytest.approx(sum(own)), "the update before the swap is another team's"


def test_undo_after_training_restores_every_agent_and_survives_a_kill(run: Path, capsys: Any, monkeypatch: Any) -> None:
    before = read_run(run)
    swapped(run, capsys, "--agent", "right", "--with", "fresh:rank=3", "--direct")
    assert main(["train", str(run), "training.stages=2", "--resume", "--json"]) == 0
    trained_on = read_run(run)
    assert trained_on.versions["left"] != before.versions["left"]

    def killed(*_: Any) -> None:
        raise SystemExit("killed")

    with monkeypatch.context() as patch:
        patch.setattr(RunDir, "write_team", killed)
        with pytest.raises(SystemExit):
            swap(run, "--undo")
    assert read_run(run) == trained_on
    capsys.readouterr()
    assert swap(run, "--undo") == 0, "the undo that was killed is completed, not undone again"
    told = json.loads(capsys.readouterr().out)
    assert read_run(run).versions == before.versions and set(told) == {"left", "right"}
    assert told["left"] == {"from": trained_on.versions["left"].name, "to": before.versions["left"].name}
    assert RunDir(run).checkpoints.load()[1] == {}, "no optimizer outlives the weights it was for"
