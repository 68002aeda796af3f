"""The command line before any command runs: every mistake is one line with the nearest right word; help has true examples."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import teamtr_lora
from teamtr_lora.cli import build_parser, main
from teamtr_lora.cli.arguments import recipe_words, run_name
from teamtr_lora.cli.examples import lines

REPO = Path(teamtr_lora.__file__).parent.parent
NANO = Path(teamtr_lora.__file__).parent / "base" / "nano"


def parsers(parser: argparse.ArgumentParser | None = None, name: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command and action, by its words."""
    parser = parser or build_parser()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, child in action.choices.items():
                yield f"{name} {word}".strip(), child
                yield from parsers(child, f"{name} {word}".strip())


NAMES = [name for name, _ in parsers()]


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line about a command line that cannot be parsed."""
    with pytest.raises(SystemExit) as caught:
        main(list(argv))
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.endswith("\n"), err
    return err.rstrip("\n")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["train"], "teamtr-lora train: the following arguments are required: RECIPE; see: teamtr-lora train --help"),
        (["score"], "teamtr-lora score: the following arguments are required: TASK, --items, --responses; see: teamtr-lora score "
                    "--help"),
        (["trian", "r.yaml"], "teamtr-lora: unknown command 'trian'; did you mean 'train'? see: teamtr-lora --help"),
        (["xyzzy"], "teamtr-lora: unknown command 'xyzzy'; see: teamtr-lora --help"),
        (["adapters", "lst"],
         "teamtr-lora adapters: unknown command 'lst'; did you mean 'list'? see: teamtr-lora adapters --help"),
        (["eval", "x", "--split", "tst"],
         "teamtr-lora eval: argument --split: invalid choice: 'tst' (choose from train, test); did you mean 'test'? "
         "see: teamtr-lora eval --help"),
        (["train", "r.yaml", "--resme"],
         "teamtr-lora train: unknown option '--resme'; did you mean '--resume'? see: teamtr-lora train --help"),
        (["train", "r.yaml", "--stages", "2"],
         "teamtr-lora train: unknown option '--stages'; settings are written without dashes: training.stages=VALUE; "
         "see: teamtr-lora train --help"),
        (["train", "r.yaml", "--trust-region.delta=1"],
         "teamtr-lora train: unknown option '--trust-region.delta'; settings are written without dashes: "
         "trust_region.delta=VALUE; see: teamtr-lora train --help"),
        (["certify", "x", "--stages", "2"], "teamtr-lora certify: unknown option '--stages'; see: teamtr-lora certify --help"),
        (["train", "r.yaml", "--rundir=x", "seed=1"],
         "teamtr-lora train: unknown option '--rundir'; did you mean '--run-dir'? see: teamtr-lora train --help"),
        (["adapters", "list", "--jsn"],
         "teamtr-lora adapters list: unknown option '--jsn'; did you mean '--json'? see: teamtr-lora adapters list --help"),
        (["adapters", "list", "--rott"],
         "teamtr-lora adapters list: unknown option '--rott'; see: teamtr-lora adapters list --help"),
        (["--json", "plan", "r.yaml"],
         "teamtr-lora plan: option '--json' stands before its command; write teamtr-lora plan --json; "
         "see: teamtr-lora plan --help"),
        (["--bogus"], "teamtr-lora: unknown option '--bogus'; see: teamtr-lora --help"),
        (["ask", "x", "y", "z"], "teamtr-lora ask: unexpected argument 'z'; see: teamtr-lora ask --help"),
        (["certify", "x", "two\nlines"],
         "teamtr-lora certify: unexpected argument 'two\\nlines'; see: teamtr-lora certify --help"),
        (["eval", "x", "--k", "0"],
         "teamtr-lora eval: argument --k: '0' is not a positive whole number; see: teamtr-lora eval --help"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], line: str) -> None:
    assert refused(capsys, *argv) == line


@pytest.mark.parametrize("option", ["--agent", "--tokens", "--votes", "--breadth", "--depth", "--beam"])
def test_what_only_baselines_take_needs_a_baseline(capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert main(["eval", "nowhere", option, "2"]) == 2
    assert capsys.readouterr().err.startswith(f"teamtr-lora: {option} needs --baseline")


def test_baselines_keep_the_defaults_that_the_help_states() -> None:
    from teamtr_lora.evaluation.inference_baselines import BaselineOptions

    text = " ".join(dict(parsers())["eval"].format_help().split())
    defaults = BaselineOptions("tree_of_thoughts")
    for name in ("breadth", "depth", "beam"):
        stated = re.search(rf"--{name} N tree_of_thoughts: [\w ]+ \(default: (\d+)\)", text)
        assert stated and int(stated[1]) == getattr(defaults, name)


def test_eval_says_where_its_results_go() -> None:
    text = " ".join(dict(parsers())["eval"].format_help().split())
    assert "RUN/evaluations" in text and "recipe or a registry team, in ./evaluations" in text


# --- examples


@pytest.mark.parametrize("name", NAMES)
def test_every_help_ends_with_examples_of_its_own(name: str) -> None:
    found = lines(name)
    assert 1 <= len(found) <= 3
    assert dict(parsers())[name].format_help().rstrip("\n").endswith("\n".join(found))
    assert any(line.split()[1:][: len(name.split())] == name.split() for line in found)


@pytest.mark.parametrize("name", ["", *NAMES])
def test_examples_are_command_lines_that_parse(name: str) -> None:
    for line in lines(name):
        words = shlex.split(line.partition(" > ")[0], comments=True)
        args, rest = build_parser().parse_known_args(words[1:])
        assert words[0] == "teamtr-lora" and args.command == words[1] and rest == []
        for word in words:
            assert not word.startswith("recipes/") or (REPO / word).is_file(), word


def test_the_overrides_in_examples_are_keys_of_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    checked = 0
    for line in lines("train") + lines("validate") + lines("plan"):
        args = build_parser().parse_args(shlex.split(line.partition(" > ")[0])[1:])
        recipes, overrides = recipe_words(args)
        if overrides:
            assert main(["validate", *(str(REPO / recipe) for recipe in recipes), *overrides]) == 0
            checked += 1
    assert checked >= 3


# --- recipes


def test_recipe_files_and_overrides_may_stand_in_any_order() -> None:
    words = ["b/base.yaml", "training.stages=2", "t/task.yml", "output_dir=x.yaml", "training.order"]
    recipes, overrides = recipe_words(build_parser().parse_args(["plan", *words]))
    assert recipes == ["b/base.yaml", "t/task.yml"] and run_name(recipes) == "base-task"
    assert overrides == ["training.stages=2", "output_dir=x.yaml", "training.order"]


def test_a_base_and_a_task_are_validated_together(capsys: pytest.CaptureFixture[str]) -> None:
    base, task = (str(REPO / "recipes" / name) for name in ("bases/nano.yaml", "tasks/countdown.yaml"))
    assert main(["validate", base, task, "--json", "task.numbers=2"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["base"]["source"] == "nano" and shown["task"]["name"] == "countdown" and shown["task"]["numbers"] == 2
    assert main(["validate", task]) == 2
    assert "name the recipe of a base, which brings it along, before this one" in capsys.readouterr().err
    assert main(["validate", base, task.replace("down", "donw")]) == 2
    assert "did you mean" in capsys.readouterr().err
    assert main(["validate", base, "training.order"]) == 2
    assert "must be section.key=value" in capsys.readouterr().err


# --- the registry


def test_the_registry_has_one_name_everywhere() -> None:
    taking = [name for name, parser in parsers() if "--registry" in parser.format_help()]
    assert set(taking) == {
        "swap", "rebase", "push", "pull", "eval", "ask", "serve",
        "adapters list", "adapters show", "adapters verify", "adapters rm", "adapters import",
    }  # fmt: skip
    assert build_parser().parse_args(["pull", "a/b", "--registry", "x"]).registry == Path("x")
    assert build_parser().parse_args(["adapters", "list"]).registry == Path("adapters")


@pytest.mark.skipif(not NANO.is_dir(), reason="no nano here")
def test_ask_finds_a_team_in_another_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(REPO / "adapters" / "column_sum", tmp_path / "others" / "column_sum")
    monkeypatch.chdir(tmp_path)
    assert main(["ask", "column_sum", "347+285", "--temperature", "0"]) == 2
    capsys.readouterr()
    assert main(["ask", "column_sum", "347+285", "--temperature", "0", "--registry", "others"]) == 0
    assert "347+285" in capsys.readouterr().out


# --- init


def test_init_names_the_program_as_it_was_started_and_the_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.argv", [str(tmp_path / ".venv" / "bin" / "teamtr-lora"), "init"])
    assert main(["init", "my team"]) == 0
    out = capsys.readouterr().out
    assert "wrote my team/questions.jsonl\n" in out and "own rows into questions.jsonl" in out
    assert out.endswith("\n  .venv/bin/teamtr-lora train 'my team/recipe.yaml'\n")
    assert "dataset" in " ".join(dict(parsers())["init"].format_help().split())


def test_with_json_nothing_else_reaches_stdout() -> None:
    code = (
        "import os, subprocess; from teamtr_lora.cli.arguments import keep_stdout_for_json, print_json; keep_stdout_for_json(); "
        "subprocess.run(['echo', 'a program']); os.write(1, b'a library'); print('code of the user'); print_json({})"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "{}\n" and all(f"a {who}" in ran.stderr for who in ("program", "library"))
    assert "code of the user" in ran.stderr


def test_a_reader_who_leaves_is_no_crash() -> None:
    command = f"set -o pipefail; {shlex.quote(sys.executable)} -m teamtr_lora keys | head -1"
    assert subprocess.run(["bash", "-c", command], capture_output=True).returncode == 0


def test_a_run_of_a_file_called_recipe_goes_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my-team").mkdir()
    monkeypatch.chdir(tmp_path / "my-team")
    assert run_name(["recipe.yaml"]) == run_name([str(tmp_path / "my-team" / "recipe.yaml")]) == "my-team"
    assert run_name(["recipes/quickstart.yaml"]) == "quickstart" and run_name(["a.yaml", "my/recipe.yml"]) == "a-my"
