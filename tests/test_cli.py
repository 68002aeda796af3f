"""The command line as a user meets it: help, exit codes, one clear line for every mistake, JSON that can be relied on."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

import teamtr_lora
from teamtr_lora.cli import main
from teamtr_lora.cli.text.summary import print_transcript
from teamtr_lora.common.errors import UserError
from teamtr_lora.runs.run_dir import RunDir, latest_run_dir
from teamtr_lora.tasks.machinery.drawn import DrawnItems

REPO = Path(teamtr_lora.__file__).parent.parent
NANO = Path(teamtr_lora.__file__).parent / "base" / "nano"
COMMANDS = {
    "train": ["RECIPE", "section.key=value", "--run-dir", "--resume", "--from", "--json", "--debug"],
    "validate": ["RECIPE", "section.key=value", "--schema", "--json", "--debug"],
    "plan": ["RECIPE", "section.key=value", "--json", "--debug"],
    "eval": ["RUN_OR_TEAM", "--split", "--k", "--temperature", "--limit", "--json", "--debug"],
    "ask": ["RUN_OR_TEAM", "question", "--temperature", "--seed", "--json", "--debug"],
    "init": ["DIR", "--debug"],
    "certify": ["RUN", "--json", "--debug"],
    "diagnose": ["RUN", "--json", "--debug"],
    "serve": ["RUN_OR_TEAM", "--host", "--port", "--accept-adapters", "--api-key-variable", "--debug"],
    "tasks": ["list", "show", "sample", "TASK", "-n", "--json", "--debug"],
    "score": ["TASK", "--items", "--responses", "--json", "--debug"],
}
SUMMARY = {
    "run_dir", "stages", "updates", "accepted", "shrunk", "rejected", "out_of_region_accepted", "accuracy_before",
    "accuracy_after", "episodes_evaluated", "tokens", "seconds", "adapters",
}  # fmt: skip
RECIPE = """
base: {source: tiny, device: cpu}
team:
  protocol: {system: Talk.}
  agents: [{name: planner, lora: {rank: 2}}, {name: solver, lora: {rank: 4}}]
task:
  {name: dataset, path: rows.jsonl, test_path: rows.jsonl, on_overlap: allow, reward: "cli_rewards:even", answer_column: answer}
rollout: {items_per_stage: 8, episodes_per_item: 4, max_message_tokens: 3}
training: {stages: 1, inner_epochs: 1, learning_rate: 0.01}
trust_region: {delta: 0.05}
evaluation: {items: 4}
"""
REWARDS = """
def even(prompts, completions, **columns):
    return [sum(b % 2 == 0 for b in text.encode()) / max(1, len(text.encode())) for text in completions]

def raises(prompts, **columns):
    print("no JSON")
    raise ValueError("no reward today")

def leaves(prompts, **columns):
    raise SystemExit(0)

def nan(prompts, **columns):
    return [float("nan")] * len(prompts)

def nobody(messages, agents):
    return "somebody"
"""


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Path:
    """A folder with a recipe, its data, its reward and (by a link) its base, all named relative to the recipe."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "cli_rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"question {n}", "answer": str(n)} for n in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tiny").symlink_to(tiny_base)
    return folder


@pytest.fixture(scope="module")
def trained(origin: Path) -> Path:
    """A finished run. Read only."""
    assert main(["train", str(origin / "recipe.yaml"), "--run-dir", str(origin / "run")]) == 0
    return origin / "run"


@pytest.fixture(scope="module")
def trained_longer(origin: Path) -> tuple[Path, str, str]:
    """The same recipe with two stages: run directory, standard output and standard error of `train --json`."""
    run, out, err = origin / "longer", io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main(["train", str(origin / "recipe.yaml"), "training.stages=2", "--run-dir", str(run), "--json"]) == 0
    return run, out.getvalue(), err.getvalue()


@pytest.fixture
def work(origin: Path, tmp_path: Path) -> Path:
    """A copy of the folder to spoil."""
    for name in ("recipe.yaml", "cli_rewards.py", "rows.jsonl"):
        shutil.copy(origin / name, tmp_path / name)
    (tmp_path / "tiny").symlink_to((origin / "tiny").resolve())
    return tmp_path


@pytest.fixture
def user_error(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must fail as the user's mistake; returns the one line it printed."""

    def run(*argv: object) -> str:
        assert main([str(part) for part in argv]) == 2
        captured = capsys.readouterr()
        lines = captured.err.strip().splitlines()
        if "--json" not in argv:
            assert len(lines) == 1, captured.err
        assert [line for line in lines if line.startswith("teamtr-lora: ")] == lines[-1:], "the last line says it all"
        assert "Traceback" not in captured.err
        return lines[-1]

    return run


def hashes(run: Path) -> dict[str, str]:
    return {agent: v["content_hash"] for agent, v in json.loads((run / "team.json").read_text()).items()}


# --- help, version, exit codes


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_its_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert [option for option in COMMANDS[command] if option not in text] == []


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    bare = capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == bare
    assert all(command in bare for command in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.strip() == f"teamtr-lora {teamtr_lora.__version__}"


def test_the_module_runs_as_a_program(tmp_path: Path) -> None:
    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "teamtr_lora", *argv], capture_output=True, text=True, cwd=tmp_path)

    missing = run("validate", "nowhere.yaml")
    assert missing.returncode == 2 and missing.stdout == ""
    assert missing.stderr.count("\n") == 1 and "nowhere.yaml" in missing.stderr
    debug = run("validate", "nowhere.yaml", "--debug")
    assert debug.returncode != 0 and "Traceback" in debug.stderr


@pytest.mark.parametrize(
    "argv",
    [
        ["fly"],
        ["train"],
        ["eval", "x", "--k", "0"],
        ["eval", "x", "--temperature", "-1"],
        ["ask", "x"],
        ["eval", "x", "--k", "²"],
    ],
)
def test_a_wrong_command_line_is_a_user_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("teamtr-lora") and error.count("\n") == 1 and "--help" in error


def test_a_crash_is_exit_1_and_its_traceback_is_under_debug(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def crash(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("teamtr_lora.recipe.load_recipe", crash)
    assert main(["validate", "x.yaml"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "ZeroDivisionError: a bug" in error and "--debug" in error
    for argv in (["--debug", "validate", "x.yaml"], ["validate", "x.yaml", "--debug"]):
        assert main(argv) == 1
        assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("teamtr_lora.recipe.load_recipe", interrupt)
    assert main(["validate", "x.yaml"]) == 130
    assert "--resume" in capsys.readouterr().err


def test_an_interrupted_run_is_named_and_goes_on_as_told(
    work: Path, trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(work)
    with monkeypatch.context() as patched:
        patched.setattr("teamtr_lora.training.trainer.train", interrupt)
        assert main(["train", "recipe.yaml"]) == 130
    assert capsys.readouterr().err.endswith("; the run had not begun: start it again\n") and not any((work / "runs").iterdir())
    with monkeypatch.context() as patched:
        patched.setattr("teamtr_lora.training.stage.train_stage", interrupt)
        assert main(["train", "recipe.yaml"]) == 130
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.endswith(f"; go on with: teamtr-lora train runs/{work.name} --resume\n")
    assert main(error.rpartition("teamtr-lora ")[2].split()) == 0
    assert hashes(work / "runs" / work.name) == hashes(trained)


# --- train


def test_train_prints_one_json_object_with_everything(trained_longer: tuple[Path, str, str]) -> None:
    run, out, err = trained_longer
    summary = json.loads(out)
    assert summary.keys() >= SUMMARY
    assert summary["run_dir"] == str(run) and summary["stages"] == 2 and summary["updates"] == 4
    assert summary["accepted"] + summary["rejected"] + summary["skipped"] == 4 and summary["shrunk"] <= summary["accepted"]
    assert summary["accepted"] >= 1, "the reward has variance: something must have been learnt from it"
    assert summary["out_of_region_accepted"] == 0
    assert summary["adapters"] == hashes(run) and set(summary["adapters"]) == {"planner", "solver"}
    assert all(0 <= summary[key] <= 1 for key in ("accuracy_before", "accuracy_after"))
    assert summary["episodes_evaluated"] == 4 and summary["tokens"] > 0 and summary["seconds"] > 0
    assert "planner" in err and "KL" in err, "progress goes to stderr"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["stage", "update", "update", "stage", "update", "update", "stage"]
    assert yaml.safe_load((run / "recipe.yaml").read_text())["training"]["stages"] == 2
    assert len(list((run / "episodes").glob("*.jsonl"))) == 4


def test_train_shows_progress_and_next_steps(
    work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(work)
    assert main(["train", "recipe.yaml"]) == 0
    text = capsys.readouterr().out
    for part in (
        "stage 1/1", "planner", "solver", "reward", "KL", "of 0.05", "tokens/s", "left", "held-out accuracy before training",
        "messages have ", "tokens on average, so trust_region.delta = 0.05 is about ", "nats a token", "by their own bounds: 0",
        "held-out accuracy after stage 1", f"run directory: runs/{work.name}", "teamtr-lora ask", "teamtr-lora eval",
    ):  # fmt: skip
        assert part in text, part
    assert main(["train", "recipe.yaml"]) == 0
    assert f"run directory: runs/{work.name}-2" in capsys.readouterr().out, "a taken folder is never written into"
    assert hashes(work / "runs" / work.name) == hashes(work / "runs" / f"{work.name}-2"), "one recipe, one result"


def test_overrides_may_stand_after_options(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(work / "recipe.yaml"), "--json", "seed=5", "training.stages=3"]) == 0
    recipe = json.loads(capsys.readouterr().out)
    assert (recipe["seed"], recipe["training"]["stages"]) == (5, 3)


def test_resume_goes_on_with_more_stages(
    trained: Path, trained_longer: tuple[Path, str, str], work: Path, origin: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(trained, work / "run"))
    assert main(["train", str(origin / "recipe.yaml"), "training.stages=2", "--run-dir", str(run), "--resume", "--json"]) == 0
    resumed, whole = json.loads(capsys.readouterr().out), json.loads(trained_longer[1])
    times = {"run_dir": "", "seconds": 0}
    assert {**resumed, **times} == {**whole, **times}


def started_from(run: Path, name: str) -> dict[str, Any]:
    """The team of a run's stage 0, and what lies in the folders of those versions."""
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    folders = {agent: run / "adapters" / agent / version for agent, version in first["versions"].items()}
    return {agent: (folder.name, (folder / name).read_bytes()) for agent, folder in folders.items()}


def test_a_run_starts_from_the_adapters_of_another_and_is_resumed_without_it(
    work: Path, trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    first = Path(shutil.copytree(trained, work / "first"))
    versions = json.loads((trained / "team.json").read_text())
    settings = ["training.learning_rate=0.02", "trust_region.delta=0.1", "rollout.items_per_stage=6", "task.test_path=null"]
    command = ["train", str(work / "recipe.yaml"), *settings, "task.test_fraction=0.4", "task.on_overlap=refuse", "--run-dir"]
    assert main([*command, str(work / "whole"), "--from", str(first)]) == 0
    with monkeypatch.context() as patched:
        patched.setattr("teamtr_lora.training.stage.train_stage", interrupt)
        assert main([*command, str(work / "stopped"), "--from", str(first)]) == 130
    state, moments = RunDir(work / "stopped").checkpoints.load()
    assert {agent: version.content_hash for agent, version in state.versions.items()} == hashes(trained)
    assert not any(tensors for tensors, _ in moments.values()), "its optimizers have seen nothing"
    for agent, (name, weights) in started_from(work / "stopped", "adapter_model.safetensors").items():
        assert name == versions[agent]["version"]
        assert weights == (trained / "adapters" / agent / name / "adapter_model.safetensors").read_bytes()
    origin = json.loads((work / "stopped" / "origin.json").read_text())["started_from"]
    assert origin == {"source": str(first), "versions": {agent: version["version"] for agent, version in versions.items()}}
    shutil.rmtree(first)
    shutil.copytree(work / "stopped", work / "again")
    assert main(["train", str(work / "stopped"), "--resume"]) == 0
    assert main([*command, str(work / "again"), "--from", str(first), "--resume"]) == 0, "its adapters are in its checkpoint"
    assert hashes(work / "stopped") == hashes(work / "again") == hashes(work / "whole") != hashes(trained)
    assert json.loads((work / "stopped" / "origin.json").read_text())["started_from"] == origin


def test_a_start_from_another_run_that_was_killed_at_once_does_not_become_a_fresh_one(
    work: Path, trained: Path, user_error: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    command = ["train", str(work / "recipe.yaml"), "--run-dir", str(work / "run"), "--resume"]
    with monkeypatch.context() as patched:
        patched.setattr("teamtr_lora.training.trainer.train", killed)
        patched.setattr(RunDir, "remove", lambda _: None)
        assert main([*command, "--from", str(trained)]) == 130
    capsys.readouterr()
    assert f"; give --from {trained} again, or choose another --run-dir" in user_error(*command)
    assert main([*command, "--from", str(trained)]) == 0
    first = started_from(work / "run", "manifest.json")
    assert {agent: json.loads(text)["content_hash"] for agent, (_, text) in first.items()} == hashes(trained)


def test_adapters_that_do_not_fit_the_recipe_are_refused(
    work: Path, trained: Path, tiny_base: Path, user_error: Callable[..., str]
) -> None:
    def refused(*overrides: str, source: Path = trained) -> str:
        return user_error("train", work / "recipe.yaml", *overrides, "--from", source, "--run-dir", work / "run")

    line = refused("team.agents.solver.lora.rank=2", 'team.agents.planner.lora.targets=["q_proj"]')
    fix = "give team.agents.planner.lora.targets=all-linear team.agents.solver.lora.rank=4"
    assert line.endswith(f"--from {trained}: its adapters have other LoRA settings than the recipe; {fix}")
    line = refused("team.agents.solver.name=checker")
    assert "has adapters for the agents planner, solver, and the recipe's are checker, planner; call the" in line
    other = Path(shutil.copytree(tiny_base, work / "other"))
    weights = load_file(other / "model.safetensors")
    save_file({name: tensor * 2 for name, tensor in weights.items()}, other / "model.safetensors", {"format": "pt"})
    assert f"base.source = {tiny_base.resolve()}, and the recipe's is {other}" in refused("base.source=other")
    assert "no run or team here" in refused(source=work / "nowhere")
    assert not (work / "run").exists()


def test_targets_that_are_spelled_otherwise_are_the_same_modules(
    work: Path, trained: Path, user_error: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["v_proj", "q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    command = ["train", str(work / "recipe.yaml"), "--from", str(trained), "--run-dir", str(work / "run")]
    line = user_error(*command, f"team.agents.solver.lora.targets=[{','.join(names[1:])}]")
    assert line.endswith("give team.agents.solver.lora.targets=all-linear")
    assert main([*command, f"team.agents.solver.lora.targets=[{','.join(names)}]"]) == 0
    first = started_from(work / "run", "manifest.json")
    assert {agent: json.loads(text)["content_hash"] for agent, (_, text) in first.items()} == hashes(trained)


# --- bad input: one line, exit 2


@pytest.mark.parametrize(
    ("command", "key"),
    [
        ("train", "evaluation.items"),
        ("train", "rollout.items_per_stage"),
        ("plan", "evaluation.items"),
        ("eval", "evaluation.items"),
    ],
)
def test_more_items_than_memory_holds_are_refused_before_any_is_made(
    work: Path, user_error: Callable[..., str], monkeypatch: pytest.MonkeyPatch, command: str, key: str
) -> None:
    monkeypatch.setattr(DrawnItems, "__getitem__", lambda *_: pytest.fail("an item was made"))
    task = ["task={name: column_sum, digits: 2}", "training.matched=update"]
    line = user_error(command, work / "recipe.yaml", *task, f"{key}=99999999")
    assert key in line and "= 99999999: this task makes items without end" in line and line.endswith("use at most 1000000")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("training.stagess=2", ["training.stagess", "did you mean 'stages'"]),
        ("trainin.stages=2", ["trainin", "did you mean 'training'"]),
        ("training.stages=two", ["training.stages = 'two'", "whole number"]),
        ("team.protocol.view=yes", ["team.protocol.view", "shared"]),
        ("rollout.items_per_stage=-4", ["rollout.items_per_stage = -4", "at least 1"]),
        ("rollout.max_message_tokens=0", ["rollout.max_message_tokens = 0", "at least 1"]),
        ("trust_region.delta=0", ["trust_region.delta = 0", "greater than 0"]),
        ("trust_region.delta=-0.5", ["trust_region.delta = -0.5", "greater than 0"]),
        ("trust_region.delta=.nan", ["trust_region.delta"]),
        ("rollout.top_p=0.9", ["rollout.top_p = 0.9", "truncation changes the policy"]),
        ("rollout.top_k=5", ["rollout.top_k = 5", "truncation changes the policy"]),
        ("team.agents=[]", ["team.agents", "at least one"]),
        ("team.agents=[{name: a}, {name: a}]", ["team.agents.1.name = 'a'", "same name"]),
        ("team.agents=[{name: ../up}]", ["team.agents.0.name = '../up'", "safe file name"]),
        ("team.agents=[{name: 'a b'}]", ["team.agents.0.name = 'a b'", "safe file name"]),
        ("team.agents=[{name: ''}]", ["team.agents.0.name = ''", "safe file name"]),
        ("team.agents=[{name: " + "x" * 33 + "}]", ["team.agents.0.name", "safe file name"]),
        ("training", ["section.key=value"]),
    ],
)
def test_recipe_mistakes(work: Path, user_error: Callable[..., str], override: str, parts: list[str]) -> None:
    for command in ("train", "validate"):
        line = user_error(command, work / "recipe.yaml", override)
        assert [part for part in parts if part not in line] == [], line
    assert not (work / "runs").exists()


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["trust_region.delta=1e-16"], ["trust_region.delta = 1e-16", "floor", "use delta >="]),
        (["team.agents.solver.lora.rank=65"], ["team.agents.solver.lora.rank: 65 is more than layer", "use at most"]),
        (["team.agents.solver.lora.targets=[q_prj]"], ["team.agents.solver.lora.targets", "q_prj", "q_proj"]),
        (["base.source=./nowhere"], ["base.source", "nowhere"]),
        (["base.source=nanoo"], ["base.source", "nanoo", "nano"]),
        (["team.protocol.context_tokens=20"], ["items to train on", "'train-1'", "do not fit into 20 tokens"]),
        (["task.path=none.jsonl"], ["task.path", "none.jsonl", "rows.jsonl"]),
        (["task.prompt_column=question"], ["no column 'question'", "prompt, answer"]),
        (["task.answer_column=solution"], ["no column 'solution'", "prompt, answer"]),
        (["task.reward=cli_rewards:odd"], ["task.reward", "odd", "even"]),
        (["task.reward=cli_reward:even"], ["task.reward", "cannot import"]),
        (["task.reward=os:system"], ["task.reward", "part of Python itself"]),
        (["task.reward=cli_rewards:raises"], ["no reward today", "test-0", "on_reward_error"]),
        (["task.reward=cli_rewards:leaves"], ["it called sys.exit(0)", "test-0", "on_reward_error"]),
        (["task.reward=torch.utils.collect_env:run"], ["task.reward", "beside the recipe", "TEAMTR_LORA_TRUST=torch"]),
        (["task.reward=cli_rewards:nan"], ["nan", "test-0", "on_reward_error"]),
        (
            ["team.router.kind=custom", "team.router.callable=cli_rewards:nobody"],
            ["team.router.callable", "somebody", "planner, solver"],
        ),
        (["task={name: column_sum, digits: 3}"], ["task.digits = 3", "2 messages"]),
        (["base.device=cuda:99"], ["base.device", "cuda:99"]),
        (["task={name: script}"], ["script"]),
    ],
    ids=lambda value: value[0][:40] if isinstance(value, list) and "=" in value[0] else "",
)
def test_mistakes_that_show_at_start_up(
    work: Path, user_error: Callable[..., str], overrides: list[str], parts: list[str]
) -> None:
    line = user_error("train", work / "recipe.yaml", *overrides, "--run-dir", work / "run", "--json")
    assert [part for part in parts if part not in line] == [], line
    assert not list(work.glob("run/checkpoint/*"))


def test_after_a_mistake_the_same_run_dir_can_be_used(work: Path, user_error: Callable[..., str]) -> None:
    user_error("train", work / "recipe.yaml", "trust_region.delta=1e-16", "--run-dir", work / "run", "--json")
    assert main(["train", str(work / "recipe.yaml"), "--run-dir", str(work / "run")]) == 0


def test_on_reward_error_zero_goes_on(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["task.reward=cli_rewards:raises", "task.on_reward_error=zero"]
    assert main(["train", str(work / "recipe.yaml"), *overrides, "--run-dir", str(work / "run"), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["accuracy_after"] == 0 and summary["skipped"] == 2, "without any variance there is nothing to learn"


def test_a_tokenizer_without_a_chat_template(work: Path, tiny_base: Path, user_error: Callable[..., str]) -> None:
    base = Path(shutil.copytree(tiny_base, work / "mute"))
    (base / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((base / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    for command in ("train", "plan"):
        assert "no chat template" in user_error(command, work / "recipe.yaml", "base.source=mute", "--json")


@pytest.mark.parametrize(("content", "message"), [("", "empty"), ("\n\n", "empty"), ("not json\n", "line 1 is not JSON")])
def test_a_dataset_without_rows(work: Path, user_error: Callable[..., str], content: str, message: str) -> None:
    (work / "rows.jsonl").write_text(content)
    assert message in user_error("train", work / "recipe.yaml", "--run-dir", work / "run", "--json")


def test_a_run_directory_that_is_taken(trained: Path, work: Path, origin: Path, user_error: Callable[..., str]) -> None:
    recipe = origin / "recipe.yaml"
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    line = user_error("train", recipe, "--run-dir", trained)
    assert "already holds a run" in line and "--resume" in line
    for flags in ([], ["--resume"]):
        line = user_error("train", recipe, "seed=1", "--run-dir", trained, *flags)
        assert "another recipe's run" in line and "seed is 0 there and 1 here" in line
    many = ["training.learning_rate=0.02", "trust_region.delta=0.1", "rollout.temperature=0.9", "seed=1"]
    line = user_error("train", recipe, *many, "trust_region.holdout=0.5", "training.stages=9", "--run-dir", trained, "--resume")
    wanted = "seed is 0 there and 1 here, rollout.temperature is 1.0 there and 0.9 here, training.learning_rate is 0.01 there and"
    assert wanted in line and ", and 1 more; such keys decide what a run learns" in line
    assert f"with other settings: train RECIPE --from {trained} --run-dir NEW; to begin anew: choose another --run-dir" in line
    (work / "full").mkdir()
    (work / "full" / "thesis.txt").write_text("precious")
    assert "not empty" in user_error("train", work / "recipe.yaml", "--run-dir", work / "full")
    assert "is a file" in user_error("train", work / "recipe.yaml", "--run-dir", work / "rows.jsonl")
    assert (work / "full" / "thesis.txt").read_text() == "precious"
    assert {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()} == before


def test_resume_without_a_run(work: Path, user_error: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)
    assert "there is no run" in user_error("train", "recipe.yaml", "--resume")


def test_resume_takes_the_run_that_began_last(tmp_path: Path) -> None:
    for name, began in {"x": 1, "x-3": 2, "x-2": 3, "x-y": 4, "x2": 5}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "origin.json").write_text("{}")
        os.utime(tmp_path / name / "origin.json", (began, began))
    (tmp_path / "x-4").mkdir()  # killed before it could begin
    assert latest_run_dir("x", tmp_path) == tmp_path / "x-2"
    shutil.rmtree(tmp_path / "x")
    assert latest_run_dir("x", tmp_path) == tmp_path / "x-2"
    with pytest.raises(UserError, match="no run"):
        latest_run_dir("z", tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "manifest", "empty"])
def test_a_corrupt_checkpoint(trained: Path, work: Path, origin: Path, user_error: Callable[..., str], damage: str) -> None:
    run = Path(shutil.copytree(trained, work / "run"))
    newest = sorted((run / "checkpoint").iterdir())[-1]
    tensors = newest / "tensors.safetensors"
    if damage == "truncated":
        tensors.write_bytes(tensors.read_bytes()[:-100])
    elif damage == "flipped":
        data = bytearray((newest / "state.json").read_bytes())
        data[len(data) // 2] ^= 1
        (newest / "state.json").write_bytes(bytes(data))
    elif damage == "missing":
        tensors.unlink()
    elif damage == "manifest":
        (newest / "manifest.json").write_text("[]")
    else:
        for path in newest.iterdir():
            path.write_bytes(b"")
    command = ("train", origin / "recipe.yaml", "training.stages=2", "--run-dir", run, "--resume", "--json")
    line = user_error(*command)
    assert "damaged" in line and newest.name in line and "remove that folder" in line
    if damage == "truncated":
        shutil.rmtree(newest)
        assert main([str(part) for part in command]) == 0, "the advice works"


def test_a_corrupt_adapter(trained: Path, work: Path, origin: Path, user_error: Callable[..., str]) -> None:
    run = Path(shutil.copytree(trained, work / "run"))
    version = json.loads((run / "team.json").read_text())["planner"]["version"]
    weights = run / "adapters" / "planner" / version / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    for argv in (["train", origin / "recipe.yaml", "--run-dir", run, "--resume"], ["eval", run], ["ask", run, "hi"]):
        assert "altered" in user_error(*argv)
    weights.write_bytes(data[: len(data) // 2])
    assert "damaged" in user_error("eval", run)


@pytest.fixture
def fsyncs(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Every durable write ends in fsync: with `full_at` = n the disk is full from the n-th on."""
    real, state = os.fsync, {"count": 0, "full_at": 0}

    def fsync(descriptor: int) -> None:
        state["count"] += 1
        if state["full_at"] and state["count"] >= state["full_at"]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    yield state


def test_a_full_disk_loses_nothing_that_was_saved(
    trained: Path,
    work: Path,
    origin: Path,
    user_error: Callable[..., str],
    fsyncs: dict[str, int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["train", origin / "recipe.yaml", "--json", "--run-dir"]
    assert main([str(part) for part in [*command, work / "counted"]]) == 0
    capsys.readouterr()
    total = fsyncs["count"]
    assert total > 40
    for share in (0.5, 0.8):
        run = work / f"run-{share}"
        fsyncs.update(count=0, full_at=int(total * share))
        assert "no space left" in user_error(*command, run)
        assert list((run / "checkpoint").glob("step-*"))
        fsyncs.update(full_at=0)
        assert main([str(part) for part in [*command, run, "--resume"]]) == 0
        capsys.readouterr()
        assert hashes(run) == hashes(trained), "resumed, it ends where an undisturbed run ends"
        assert not list(run.rglob(".tmp-*"))


def test_a_disk_that_is_full_at_once_leaves_a_folder_to_start_in(
    work: Path, user_error: Callable[..., str], fsyncs: dict[str, int]
) -> None:
    fsyncs.update(full_at=1)
    assert "no space left" in user_error("train", work / "recipe.yaml", "--run-dir", work / "run", "--json")
    fsyncs.update(full_at=0)
    assert main(["train", str(work / "recipe.yaml"), "--run-dir", str(work / "run"), "--resume"]) == 0, "as the message advised"


def test_resuming_a_run_that_never_began_starts_it_and_says_so(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Killed before its folder was made, or mistyped."""
    assert main(["train", str(work / "recipe.yaml"), "--run-dir", str(work / "new"), "--resume", "--json"]) == 0
    captured = capsys.readouterr()
    assert f"there is no run in {work / 'new'} yet; starting one" in captured.err
    assert json.loads(captured.out)["updates"] == 2


def test_a_folder_that_may_not_be_written(work: Path, user_error: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "mkdir", refuse)
    line = user_error("train", work / "recipe.yaml", "--run-dir", work / "run", "--json")
    assert "cannot write here" in line and "--run-dir" in line


# --- validate, plan, init


def test_validate_prints_the_resolved_recipe(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(work / "recipe.yaml"), "team.agents.solver.lora.rank=3"]) == 0
    text = capsys.readouterr().out
    again = work / "again.yaml"
    again.write_text(text)
    assert yaml.safe_load(text)["team"]["agents"][1]["lora"]["rank"] == 3
    assert main(["validate", str(again)]) == 0
    assert capsys.readouterr().out == text, "what it prints is itself a recipe"


def test_validate_reports_every_problem_at_once(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [
        "training.stagess=2",
        "trust_region.delta=-1",
        "rollout.top_p=0.5",
        "team.agents.0.name=A B",
        "base.precision=fp8",
    ]
    assert main(["validate", str(work / "recipe.yaml"), *overrides]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1 + len(overrides) and "5 problems" in lines[0]
    for key in ("training.stagess", "trust_region.delta", "rollout.top_p", "team.agents.0.name", "base.precision"):
        assert sum(key in line for line in lines[1:]) == 1, key


def test_validate_schema_is_a_json_schema_that_accepts_our_recipes(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["$schema"].endswith("2020-12/schema") and "trust_region" in schema["properties"]
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator
    validator.check_schema(schema)
    for path in [work / "recipe.yaml", *sorted((REPO / "recipes").glob("*.yaml"))]:
        validator(schema).validate(yaml.safe_load(path.read_text()))
    with pytest.raises(jsonschema.ValidationError):
        validator(schema).validate({"team": {"agents": [{"name": "a"}]}, "training": {"stagess": 1}})


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("task.path=row.jsonl", ["task.path = 'row.jsonl': no such file", "did you mean 'rows.jsonl'?"]),
        ("task.reward=nosuch:f", ["task.reward = 'nosuch:f': cannot import it: there is no nosuch.py beside the recipe, in "]),
        ("task.reward=os:system", ["task.reward = 'os:system': os is part of Python itself"]),
        ("task.reward=[cli_rewards:even, torch.utils.collect_env:run]", ["task.reward.1 = ", "TEAMTR_LORA_TRUST=torch"]),
    ],
)
def test_validate_looks_for_what_a_recipe_names(
    work: Path, user_error: Callable[..., str], override: str, parts: list[str]
) -> None:
    line = user_error("validate", work / "recipe.yaml", override)
    assert [part for part in parts if part not in line] == [], line


def test_validate_needs_a_recipe(user_error: Callable[..., str]) -> None:
    assert "RECIPE" in user_error("validate")


@pytest.mark.parametrize("path", sorted((REPO / "recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_recipes_are_valid(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(path)]) == 0
    assert path.read_text().startswith("# "), "one line of comment says what each is for"


def test_plan_reads_no_weights(work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def load(*_: object, **__: object) -> None:
        raise AssertionError("plan loaded weights")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
    assert main(["plan", str(work / "recipe.yaml"), "--json"]) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert plan["updates_per_stage"] == 2 and plan["episodes_per_update"] == 32 and plan["episodes_per_stage"] == 64
    assert plan["sampled_tokens_per_stage_at_most"] == 2 * 32 * 2 * 3
    assert plan["adapter_parameters"]["solver"] == 2 * plan["adapter_parameters"]["planner"], "twice the rank"
    assert {"base", "adapters", "optimizer", "KV cache", "activations", "KL head chunk"} <= plan["memory_bytes"].keys()
    parts = plan["memory_bytes"].values()
    assert max(parts) < plan["memory_total_bytes"] <= sum(parts), "not all parts are alive at once"
    assert main(["plan", str(work / "recipe.yaml")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in ("updates", "episodes", "sampled tokens", "KV cache", "Trust region", "0.05 nats", "95% confidence",
                 "In a message of 3 tokens, the longest allowed, that is 0.02 nats a token."):  # fmt: skip
        assert part in text, part
    assert not (work / "runs").exists()


def test_plan_counts_the_adapters_that_train_makes(trained: Path, origin: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors import safe_open

    assert main(["plan", str(origin / "recipe.yaml"), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    for agent, version in json.loads((trained / "team.json").read_text()).items():
        with safe_open(trained / "adapters" / agent / version["version"] / "adapter_model.safetensors", "np") as file:
            assert sum(file.get_tensor(name).size for name in file.keys()) == plan["adapter_parameters"][agent]  # noqa: SIM118


TINY_STAGE = ["training.stages=1", "rollout.items_per_stage=8", "rollout.episodes_per_item=2", "evaluation.items=4"]


@pytest.mark.parametrize(
    "source", ["tiny", pytest.param("nano", marks=pytest.mark.skipif(not NANO.is_dir(), reason="no nano here"))]
)
def test_init_writes_a_recipe_that_trains(
    tmp_path: Path, tiny_base: Path, source: str, capsys: pytest.CaptureFixture[str], user_error: Callable[..., str]
) -> None:
    folder = tmp_path / "mine"
    assert main(["init", str(folder)]) == 0
    assert "teamtr-lora train" in capsys.readouterr().out
    recipe = str(folder / "recipe.yaml")
    assert main(["validate", recipe]) == 0
    overrides = [*TINY_STAGE, *([f"base.source={tiny_base}"] if source == "tiny" else [])]
    capsys.readouterr()
    assert main(["train", recipe, *overrides, "--run-dir", str(tmp_path / "run"), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["updates"] == 2 and summary["episodes_evaluated"] == 4
    before = (folder / "recipe.yaml").read_text()
    assert "not empty" in user_error("init", folder)
    assert (folder / "recipe.yaml").read_text() == before


@pytest.mark.skipif(not NANO.is_dir(), reason="no nano here")
def test_the_quickstart_recipe_plays_with_the_embedded_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not a training test: one tiny stage, then the next commands that train prints."""
    run = str(tmp_path / "run")
    quick = [*TINY_STAGE, "training.inner_epochs=1", "trust_region.backtracks=1"]
    assert main(["train", str(REPO / "recipes" / "quickstart.yaml"), *quick, "--run-dir", run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["out_of_region_accepted"] == 0
    assert main(["eval", run, "--limit", "16", "--json"]) == 0
    evaluation = json.loads(capsys.readouterr().out)
    assert set(evaluation["agents"]) == {"planner", "solver", "checker"} and evaluation["coordination"] is not None
    assert main(["ask", run, "347+285", "--temperature", "0"]) == 0
    text = capsys.readouterr().out
    assert "347+285" in text and "=" in text


# --- eval, ask


def test_eval_json(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["eval", str(trained), "--k", "3", "--limit", "5", "--temperature", "0.8", "--json"]
    assert main(argv) == 0
    result = json.loads(capsys.readouterr().out)
    assert 0 <= result["avg_at_k"] <= result["pass_at_k"] <= 1
    assert result["standard_error"] is not None and result["pass_at_k_standard_error"] is not None
    assert (result["k"], result["items"], result["episodes"], result["temperature"], result["split"]) == (3, 5, 15, 0.8, "test")
    assert {"mean_reward", "agents", "coordination", "sampled_tokens"} <= result.keys()
    assert main(argv) == 0
    assert json.loads(capsys.readouterr().out) == result


def test_eval_table_and_defaults(trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["eval", str(trained), "--split", "train"]) == 0
    text = capsys.readouterr().out
    for part in ("4 train items, k = 1, temperature 1", "avg@1", "pass@1", "mean reward", "standard error", "4 episodes"):
        assert part in text, part


def test_a_transcript_that_a_full_context_ended_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    message = {"agent": "a", "version": "v0", "tokens": 3, "finish": "length", "text": "1+"}
    for ended in ("router", "overflow"):
        print_transcript({"prompt": "1+1", "messages": [message], "answer": "1+", "ended": ended})
        assert ("nobody else could speak" in capsys.readouterr().out) == (ended == "overflow")


def test_ask_prints_the_transcript(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ask", str(trained), "What is [bold]this[/]?", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["prompt"] == "What is [bold]this[/]?"
    assert [m["agent"] for m in record["messages"]] == ["planner", "solver"]
    versions = json.loads((trained / "team.json").read_text())
    assert [m["version"] for m in record["messages"]] == [versions[a]["version"] for a in ("planner", "solver")]
    assert main(["ask", str(trained), "What is [bold]this[/]?"]) == 0
    text = capsys.readouterr().out
    assert "What is [bold]this[/]?" in text, "markup in a question is text"
    assert text.index("planner") < text.index("solver") < text.index("the team's answer: ")
    assert record["answer"] == record["messages"][-1]["text"].strip() and text.endswith("the team's answer: its last message\n")
    assert main(["ask", str(trained), "What is [bold]this[/]?", "--seed", "1", "--json"]) == 0
    other = json.loads(capsys.readouterr().out)
    assert [m["text"] for m in other["messages"]] != [m["text"] for m in record["messages"]]


def test_mistakes_with_a_stored_team(trained: Path, work: Path, user_error: Callable[..., str]) -> None:
    assert "no run or team here" in user_error("eval", work / "nowhere")
    assert "no run or team here" in user_error("ask", work.parent, "hi")
    assert "the question is empty" in user_error("ask", trained, "  ")
    assert "longer than the context" in user_error("ask", trained, "x" * 600)
    run = Path(shutil.copytree(trained, work / "run"))
    (run / "team.json").write_text("{")
    assert "no proper JSON" in user_error("eval", run)
    (run / "team.json").unlink()
    assert "no team yet" in user_error("eval", run)


def test_a_run_can_be_moved(trained: Path, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moved = Path(shutil.copytree(trained, work / "elsewhere"))
    spoken = []
    for run in (trained, moved):
        assert main(["ask", str(run), "hello", "--json"]) == 0
        spoken.append(json.loads(capsys.readouterr().out))
    assert spoken[0] == spoken[1]
