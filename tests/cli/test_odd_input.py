"""Paths that no file system takes and recipes of 20,000 keys: one line or a bounded list, soon, and exit 2."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pace import processor_seconds

from teamtr_lora.cli import main
from teamtr_lora.recipe import yaml_text

RECIPE = "team: {agents: [{name: a}]}\ntask: {name: countdown}\n"
LONG = "z" * 300


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "r.yaml").write_text(RECIPE)
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "argv",
    [
        ["train", "r.yaml", r'output_dir="a\0b"'],
        ["train", "r.yaml", f"output_dir={LONG}"],
        ["train", "r.yaml", f"output_dir={LONG}/b"],
        ["train", "r.yaml", "--run-dir", LONG],
        ["train", "r.yaml", "--run-dir", "file/run"],
        ["train", LONG, "--resume"],
        ["baseline", "grpo", "r.yaml", "--run-dir", LONG],
        ["eval", "r.yaml", "--out", LONG],
        ["eval", "r.yaml", "--out", "file/out"],
        ["eval", LONG],
        ["eval", "--compare", LONG, LONG],
        ["ask", LONG, "hello"],
        ["certify", LONG],
        ["diagnose", LONG],
        ["runs", "nowhere"],
        ["runs", "file"],
        ["view", LONG],
        ["report", "loop"],
        ["report", "loop/run"],
        ["init", LONG],
        ["init", "file/new"],
        ["adapters", "list", "--registry", LONG],
        ["adapters", "verify", LONG],
        ["adapters", "import", LONG, "--team", "t"],
        ["push", LONG, "--repo", "a/b"],
        ["swap", LONG, "--agent", "a", "--with", "fresh"],
        ["rebase", LONG, "--to", "nano"],
        ["serve", LONG],
        ["validate", f"{LONG}.yaml"],
        ["plan", "r.yaml", f"base.source={LONG}"],
        ["tasks", "sample", "dataset", f"path={LONG}.jsonl", "reward=a:b"],
        ["score", "countdown", "--items", LONG, "--responses", LONG],
    ],
    ids=lambda argv: " ".join(word[:20] for word in argv),
)
def test_a_path_that_cannot_be_is_one_line(argv: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "crashed" not in error and "Traceback" not in error
    assert sorted(p.name for p in folder.iterdir()) == ["file", "loop", "r.yaml"], "nothing is left behind"


@pytest.mark.parametrize("name", ["origin.json", "team.json", "metrics.jsonl", "recipe.yaml", "checkpoint"])
@pytest.mark.parametrize("kind", ["folder", "pipe", "file"])
def test_a_run_directory_with_something_else_in_place_of_a_file(
    name: str, kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder / "run"
    run.mkdir()
    for other in {"origin.json", "recipe.yaml"} - {name}:
        (run / other).write_text(RECIPE if other == "recipe.yaml" else "{}")
    {"folder": (run / name).mkdir, "pipe": lambda: os.mkfifo(run / name), "file": (run / name).touch}[kind]()
    for argv in (["train", "run", "--resume"], ["eval", "run"], ["certify", "run"], ["adapters", "verify", "run"]):
        if main(argv) == 0:
            assert argv[0] == "train" and kind == "file"
        assert "crashed" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "body",
    [
        RECIPE + "".join(f"key_{n}x: {n}\n" for n in range(20_000)),
        RECIPE + "training:\n" + "".join(f"  lerning_rate{n}: {n}\n" for n in range(20_000)),
        RECIPE + "rollout: {" + ", ".join(f"e{n}: [1]" for n in range(20_000)) + "}\n",
        "team:\n  agents:\n" + "".join(f"  - {{name: A{n}, rol: x}}\n" for n in range(20_000)) + "task: {name: countdown}\n",
    ],
    ids=["top", "section", "flow", "agents"],
)
def test_twenty_thousand_mistakes_are_told_soon(body: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "r.yaml").write_text(body)
    main(["validate", "r.yaml", "seed=x"])  # what is imported and cached once does not count
    capsys.readouterr()
    with processor_seconds(3):
        assert main(["validate", "r.yaml"]) == 2
    error = capsys.readouterr().err
    assert ("has 20,000 problems:" in error and "and 19,950 more" in error) or "more than 100000 values" in error
    assert len(error) < 100_000 and error.rstrip().splitlines()[-1].strip().startswith(("and ", "teamtr-lora"))


def test_large_and_small_files_are_read_alike() -> None:
    padding = "# " + "x" * yaml_text.LARGE + "\n"
    for text in ("a: 1e-3\nb: no\nc: [010, 0x10, ~, 'yes', 2024-01-01, .5]\n", RECIPE, "a: &x {b: 1}\nc: {<<: *x, d: 2}\n"):
        assert yaml_text.parse(padding + text, "f") == yaml_text.parse(text, "f")
