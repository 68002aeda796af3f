"""Only runs/ knows the files of a run directory, and it follows no link in one."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from teamtr_lora.cli import main
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import Recipe
from teamtr_lora.runs import evaluations, layout, run_state
from teamtr_lora.runs.evaluations import EvaluationStore, read_evaluation
from teamtr_lora.runs.metrics import read_rows
from teamtr_lora.runs.run_dir import RunDir
from teamtr_lora.runs.stored_run import load_run_recipe, read_run

PACKAGE = Path(layout.__file__).resolve().parent.parent
FOLDERS = {
    layout.CHECKPOINTS,
    layout.ADAPTERS,
    layout.EPISODES,
    layout.EVALUATIONS,
    layout.TRL,
    layout.ROLLOUTS,
    layout.SCRIPT_ROWS,
    layout.SWAP_WORK,
}
FILES = (layout.OWN_NAMES - FOLDERS - {layout.LOCK}) | {
    run_state.STATE, run_state.TENSORS, evaluations.SETTINGS, evaluations.ANSWERS, evaluations.RESULT
}  # fmt: skip
# The same names for something that is no run's file.
OTHERS = {
    ("recipe/recipe_files.py", "recipe.yaml"),  # an example in a message
    ("cli/recipe_commands.py", "recipe.yaml"),  # what `init` wrote
    ("registry/pushed_files.py", "team.json"),  # a team's repository on the hub
}


def test_nobody_else_names_a_file_of_a_run() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        where = path.relative_to(PACKAGE)
        if where.parts[0] == "runs":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            below = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and isinstance(node.right, ast.Constant)
            name = node.right.value if below else node.value if isinstance(node, ast.Constant) else None  # type: ignore[attr-defined]
            if not isinstance(name, str):
                continue
            file = name.rpartition("/")[2]  # a whole word or the end of a path; prose that mentions a file is neither
            if (file in FILES and " " not in name) or (below and name in FOLDERS):
                found.append((str(where), name))
    assert set(found) - OTHERS == set()
    assert set(found) >= OTHERS, "an exception that nothing needs"


LINKED = [
    "recipe.yaml", "origin.json", "team.json", "metrics.jsonl", "adapters", "adapters/left", "adapters/left/*",
    "adapters/left/*/adapter_model.safetensors", "checkpoint", "checkpoint/step-000001", "checkpoint/step-000001/state.json",
    "checkpoint/step-000001/tensors.safetensors", "episodes", "episodes/stage-0001.jsonl",
]  # fmt: skip
NEW = [".tmp-1-team.json", "adapters/.tmp-1-left", "checkpoint/.tmp-7-step-000002", ".lock", ".swap", "evaluations", "trl",
       "stage_contexts.json", "rebase.json", "baseline.json"]  # fmt: skip


def _contents(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("place", LINKED + NEW)
def test_a_link_in_a_run_directory_is_refused_before_anything_is_touched(run: RunDir, recipe: Recipe, place: str) -> None:
    """By whatever opens the run; what the link points to is neither read nor written, and the link stays."""
    outside = run.path.parent / "outside"
    if place in NEW:
        link = run.path / place
        link.unlink(missing_ok=True)
        outside.mkdir()
        (outside / "file").write_text("somebody's")
    else:
        (link,) = run.path.glob(place)
        shutil.move(link, outside)
    link.symlink_to(outside)
    kept = _contents(outside) if outside.is_dir() else outside.read_bytes()
    uses: list[Callable[[], Any]] = [
        lambda: read_run(run.path), lambda: read_rows(run.path), lambda: load_run_recipe(run.path), lambda: run.read_baseline(),
        lambda: run.check(recipe, resume=True), lambda: run.lock(), lambda: run.claim(recipe, {}),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(UserError) as caught:
            use()
        assert str(caught.value).startswith(f"{link}: a link") and "\n" not in str(caught.value)
    assert link.is_symlink() and (_contents(outside) if outside.is_dir() else outside.read_bytes()) == kept


@pytest.mark.parametrize("place", ["metrics.jsonl", "adapters", ".tmp-1-x"])
def test_every_command_refuses_a_linked_run_in_one_line(run: RunDir, capsys: Any, monkeypatch: Any, place: str) -> None:
    monkeypatch.chdir(run.path.parent)
    link = run.path / place
    if link.exists():
        shutil.move(link, run.path.parent / "outside")
    link.symlink_to(run.path.parent / "outside")
    for words in (
        ["certify", "run"], ["diagnose", "run"], ["ask", "run", "hello"], ["eval", "run"], ["serve", "run"],
        ["train", "run", "--resume"], ["swap", "run", "--undo"], ["swap", "run", "--agent", "left", "--with", "fresh"],
        ["rebase", "run", "--to", "nano"], ["adapters", "import", "run", "--team", "mine"],
    ):  # fmt: skip
        assert main(words) == 2, words
        error = capsys.readouterr().err
        assert f"run/{place}: a link, which is not followed" in error and error.count("\n") == 1, (words, error)


def test_a_run_may_be_reached_by_a_link_and_others_may_keep_links_in_it(run: RunDir) -> None:
    """wandb, for one, writes links into the folder that it is given."""
    alias = run.path.parent / "latest"
    alias.symlink_to(run.path)
    (run.path / "wandb").mkdir()
    (run.path / "wandb" / "latest-run").symlink_to(run.path)
    assert read_run(alias) == read_run(run.path) and len(read_rows(alias)) == 2


@pytest.mark.parametrize("name", ["settings.json", "episodes.jsonl", "result.json", ".lock", ".tmp-3-result.json"])
def test_a_link_in_an_evaluation_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "evaluation"
    store = EvaluationStore(folder, {"items": 1, "k": 1}, dict)
    with store.claimed():
        store.append([{"item": "a"}])
        store.finish({})
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "outside")
    with pytest.raises(UserError, match="a link"), store.claimed():
        pass
    with pytest.raises(UserError, match="a link"):
        read_evaluation(folder, dict)
    assert not (tmp_path / "outside").exists()


def test_reading_a_run_needs_no_torch(run: RunDir) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from teamtr_lora.runs.stored_run import read_run\n"
        "from teamtr_lora.runs import evaluations, run_dir, transcripts\n"
        "run = read_run(Path(sys.argv[1])); assert len(run.rows()) == 2 and run.history().metrics == {'avg_at_k': 0.5}\n"
        "found = {'torch', 'transformers', 'peft', 'numpy'} & set(sys.modules); assert not found, found"
    )
    result = subprocess.run([sys.executable, "-c", code, str(run.path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
