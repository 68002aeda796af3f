"""An escape sequence in every field of every command's output: it is shown, and never reaches the terminal.

Two ways: commands are run on files, names and arguments that hold one; and what a command is about to print is spoilt in every
text that it holds, whether or not a file could bring it there today.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import importlib
import json
import pkgutil
import shutil
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import teamtr_lora
from teamtr_lora.cli import main, text
from teamtr_lora.cli.text.hub_transfers import print_pulled, print_pushed
from teamtr_lora.common.visible import visible, visible_streams
from teamtr_lora.registry.hub import Pulled, Pushed

PACKAGE = Path(teamtr_lora.__file__).parent
EVIL = "\x1b[2J\x1b]0;owned\x07\u202e\x9b31m\rover"
SHOWN = visible(EVIL)
RECIPE = """
base: {source: tiny, device: cpu}
team:
  protocol: {system: Talk.}
  agents: [{name: planner, lora: {rank: 2}}, {name: solver, lora: {rank: 4}}]
task:
  {name: dataset, path: rows.jsonl, test_path: rows.jsonl, on_overlap: allow, reward: "text_rewards:even", answer_column: answer}
rollout: {items_per_stage: 8, episodes_per_item: 4, max_message_tokens: 3}
training: {stages: 1, inner_epochs: 1, learning_rate: 0.01}
trust_region: {delta: 0.05}
evaluation: {items: 4}
"""
REWARDS = f"""
def even(prompts, completions, **columns):
    print({EVIL!r})
    return [float(len(text) % 2) for text in completions]
"""
# What decides how something is printed, and is checked where it is read: one of a few words of ours.
WORDS = {"kind", "verdict", "decision", "how", "finish", "status", "made_by", "theorem"}


def steers(text: str) -> list[str]:
    """Independent of the implementation: by Unicode's own categories."""
    found = [c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c not in "\n\t"]
    return [f"U+{ord(c):04X}" for c in found]


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Path:
    folder = tmp_path_factory.mktemp("hostile-text")
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "text_rewards.py").write_text(REWARDS)
    rows = [{"id": f"id {n} {EVIL}", "prompt": f"question {n} {EVIL}", "answer": EVIL} for n in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tiny").symlink_to(tiny_base)
    return folder


@pytest.fixture(scope="module")
def trained(origin: Path) -> Path:
    assert main(["train", str(origin / "recipe.yaml"), "--run-dir", str(origin / "run")]) == 0
    return origin / "run"


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command and returns all that it printed, which steers nothing; `code` is what it must end with (None: 0 or 2)."""

    def run(*argv: object, code: int | None = 0) -> str:
        capfd.readouterr()
        try:
            ended = main([str(word) for word in argv])
        except SystemExit as stop:
            ended = int(stop.code or 0)
        out, err = capfd.readouterr()
        assert not steers(out + err), (argv, out + err)
        assert ended in ((0, 2) if code is None else (code,)), out + err
        return out + err

    return run


def spoilt(value: Any, name: str = "") -> Any:
    """A copy with the attack in every text that it holds, numbers and our own words aside."""
    if isinstance(value, str):
        return value if name in WORDS else f"{value}{EVIL}"
    if isinstance(value, Path):
        return Path(f"{value}{EVIL.replace('/', '')}")
    if isinstance(value, dict):
        return {key: spoilt(inner, key if isinstance(key, str) else "") for key, inner in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(spoilt(inner, name) for inner in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(made, field.name, spoilt(getattr(value, field.name), field.name))
        return made
    if hasattr(value, "model_fields_set"):
        changed = {key: spoilt(getattr(value, key), key) for key in type(value).model_fields}
        return value.model_copy(update=changed)
    return value


@pytest.fixture
def printers(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Every printer of cli/text gets a spoilt argument; the names of those that were called."""
    called: set[str] = set()
    for module in pkgutil.iter_modules(text.__path__, f"{text.__name__}."):
        loaded = importlib.import_module(module.name)
        for name, function in list(vars(loaded).items()):
            if name.startswith("print_") and getattr(function, "__module__", "") == module.name:

                def printer(*args: Any, __function: Any = function, __name: str = name, **more: Any) -> Any:
                    called.add(__name)
                    plain = {"print_task"}  # its argument is looked up
                    return __function(*(args if __name in plain else map(spoilt, args)), **more)

                monkeypatch.setattr(loaded, name, printer)
    return called


def test_every_printer_shows_what_it_is_given(
    origin: Path, trained: Path, tmp_path: Path, said: Callable[..., str], printers: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    registry = tmp_path / "teams"
    run, store = str(trained), ["--registry", str(registry)]
    held = [
        said("train", origin / "recipe.yaml", "--run-dir", tmp_path / "other"),
        said("plan", origin / "recipe.yaml"),
        said("eval", run, "--limit", "2", "--out", tmp_path / "one"),
        said("eval", "--compare", tmp_path / "one", tmp_path / "one"),
        said("ask", run, f"What? {EVIL}"),
        said("adapters", "import", run, "--team", "mine", *store),
        said("adapters", "list", *store),
        said("adapters", "show", "mine", *store),
        said("adapters", "show", "mine", "--agent", "solver", *store),
        said("swap", run, "--agent", "solver", "--with", "fresh:rank=4", "--dry-run"),
        said("tasks", "sample", "countdown", "-n", "1"),
    ]
    assert [n for n, out in enumerate(held) if SHOWN not in out] == []
    numbers = [["adapters", "verify", *store], ["certify", run], ["diagnose", run]]
    for command in [*numbers, ["tasks", "list"], ["tasks", "show", "gsm8k"], ["keys", "delta"]]:
        said(*command)
    needs_more = {"print_pushed", "print_pulled", "print_rebase", "print_undo", "print_scores"}  # the tests below
    every = {name for module in pkgutil.iter_modules(text.__path__, f"{text.__name__}.")
             for name in vars(importlib.import_module(module.name)) if name.startswith("print_")}  # fmt: skip
    others = {"print_json", "print_table", "print_hanging", "print_runs"}  # what the printers use; `runs` has a test of its own
    assert every - printers - needs_more - others == set()


def test_what_the_hub_says(capfd: pytest.CaptureFixture[str]) -> None:
    pushed = Pushed("r", "main", "t", None, {EVIL: 1}, [EVIL], [EVIL], EVIL, commit=EVIL)
    pulled = Pulled("r", EVIL, EVIL, EVIL, 1, {EVIL: EVIL}, "new", 1, [EVIL])
    with visible_streams():
        print_pushed(pushed), print_pulled(pulled)
    out = capfd.readouterr().out
    assert not steers(out) and out.count(SHOWN) >= 5


def test_swaps_and_scores(
    origin: Path, trained: Path, tmp_path: Path, said: Callable[..., str], printers: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    said("swap", run, "--agent", "solver", "--with", "fresh:rank=4", "--direct")
    said("swap", run, "--undo")
    (tmp_path / "items.jsonl").write_text(said("tasks", "sample", "countdown", "-n", "2", "--json"))
    rows = [json.loads(line) for line in (tmp_path / "items.jsonl").read_text().splitlines()]
    answers = "".join(json.dumps({"id": row["id"], "response": EVIL}) + "\n" for row in rows)
    (tmp_path / "answers.jsonl").write_text(answers)
    said("score", "countdown", "--items", tmp_path / "items.jsonl", "--responses", tmp_path / "answers.jsonl")
    assert {"print_swap", "print_undo", "print_scores", "print_checks"} <= printers


def test_items_of_a_dataset(origin: Path, said: Callable[..., str]) -> None:
    settings = [f"path={origin / 'rows.jsonl'}", f"test_path={origin / 'rows.jsonl'}", "reward=text_rewards:even"]
    assert SHOWN in said("tasks", "sample", "dataset", *settings, code=2), "the items that are on both sides"
    for split in ("train", "test"):
        assert SHOWN in said("tasks", "sample", "dataset", *settings, "on_overlap=allow", "--split", split)


def test_a_run_trains_and_plans_on_such_rows(origin: Path, tmp_path: Path, said: Callable[..., str]) -> None:
    folder = tmp_path / f"run {EVIL.replace('/', '')} [/] [bold]"
    assert SHOWN in said("train", origin / "recipe.yaml", "--run-dir", folder)
    for command in (["ask", folder, "q"], ["certify", folder], ["diagnose", folder]):
        said(*command)
    rows = (folder / "metrics.jsonl").read_text()
    assert EVIL not in rows


ERRORS: dict[str, list[str]] = {
    "unknown command": [EVIL],
    "unknown option": ["train", f"--{EVIL}"],
    "unexpected word": ["docs", "recipes", EVIL],
    "choice": ["eval", "x", "--split", EVIL],
    "number": ["eval", "x", "--k", EVIL],
    "recipe": ["validate", f"nowhere{EVIL}.yaml"],
    "topic": ["docs", EVIL],
    "key": ["keys", EVIL],
    "task": ["tasks", "show", EVIL],
    "setting": ["tasks", "sample", "countdown", f"{EVIL}={EVIL}"],
    "override": ["validate", "RECIPE", f"{EVIL}={EVIL}"],
    "override's value": ["validate", "RECIPE", f"training.stages={EVIL}"],
    "base": ["plan", "RECIPE", f"base.source={json.dumps(EVIL)}"],
    "hub id": ["plan", "RECIPE", f"base.source={json.dumps('org/' + EVIL)}"],
    "team": ["ask", f"team{EVIL}", "hello"],
    "registry": ["adapters", "list", "--registry", f"nowhere{EVIL}"],
    "stored team": ["adapters", "show", EVIL],
    "agent": ["adapters", "show", "t", "--agent", EVIL],
    "import": ["adapters", "import", EVIL, "--team", "t"],
    "import's name": ["adapters", "import", ".", "--team", EVIL],
    "removed": ["adapters", "rm", EVIL, "--all"],
    "verified": ["adapters", "verify", EVIL],
    "repository": ["pull", EVIL],
    "revision": ["pull", "a/b", "--revision", EVIL],
    "pushed": ["push", EVIL, "--repo", "a/b"],
    "swapped": ["swap", EVIL, "--agent", "a", "--with", "fresh"],
    "rebased": ["rebase", EVIL, "--to", "nano"],
    "certified": ["certify", EVIL],
    "diagnosed": ["diagnose", EVIL],
    "served": ["serve", EVIL],
    "score": ["score", "countdown", "--items", f"i{EVIL}.jsonl", "--responses", f"r{EVIL}.jsonl"],
    "baseline": ["baseline", "grpo", f"x{EVIL}.yaml"],
    "compared": ["eval", "--compare", f"a{EVIL}", f"b{EVIL}"],
}


@pytest.mark.parametrize("argv", ERRORS.values(), ids=ERRORS)
def test_mistakes(
    argv: list[str], origin: Path, said: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [str(origin / "recipe.yaml") if word == "RECIPE" else word for word in argv]
    code = 0 if argv[:2] == ["adapters", "list"] else 2
    assert said(*words, code=code).count("\n") <= 3
    said("--debug", *words, code=code)


FILES = {
    "extends": f"extends: {json.dumps(f'parent{EVIL}.yaml')}",
    "a circle": f"extends: {json.dumps(f'{EVIL}.yaml'.replace('/', ''))}",
    "a key": f"{json.dumps(EVIL)}: 1",
    "a key with a line": json.dumps("x\nteamtr-lora: all is well") + ": 1",
    "a nested key": f"training: {{{json.dumps(EVIL)}: 1}}",
    "a value": f"training: {{optimizer: {json.dumps(EVIL)}}}",
    "a reward": f"task: {{name: dataset, path: rows.jsonl, reward: {json.dumps(EVIL)}}}",
    "a path": f"task: {{name: dataset, path: {json.dumps(EVIL + '.jsonl')}, reward: 'a:b'}}",
    "a name": f"team: {{agents: [{{name: {json.dumps(EVIL)}}}]}}",
    "a role": f"team: {{agents: [{{name: a, role: {json.dumps(EVIL)}}}], router: {{kind: judge}}}}",
    "no YAML": f"a: [{EVIL}",
    "a tag": f"a: !{EVIL} x",
}


@pytest.mark.parametrize("body", FILES.values(), ids=FILES)
def test_recipes(body: str, tmp_path: Path, said: Callable[..., str]) -> None:
    for name in ("recipe.yaml", f"{EVIL}.yaml".replace("/", "")):
        (tmp_path / name).write_text(body + "\n")
        printed = said("validate", tmp_path / name, code=2)
        assert "\nteamtr-lora: all is well" not in printed


def test_a_stranger_s_registry_and_run(
    trained: Path, tmp_path: Path, said: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said("adapters", "import", trained, "--team", "mine", "--registry", "teams")
    evil = EVIL.replace("/", "")
    (tmp_path / "teams" / evil).mkdir()
    (tmp_path / "teams" / "mine" / evil).write_text("x")
    (tmp_path / "teams" / "mine" / "solver" / evil).mkdir()
    said("adapters", "list", "--registry", "teams")
    assert visible(evil) in said("adapters", "verify", "--registry", "teams", code=2)
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    for name, spoil in {
        "team.json": lambda t: t.replace("solver", json.dumps(evil)[1:-1]),
        "metrics.jsonl": lambda t: t.replace('"solver"', json.dumps(evil)),
        "recipe.yaml": lambda t: t + json.dumps(evil) + ": 1\n",
        "origin.json": lambda t: t.replace("recipe_folder", json.dumps(evil)[1:-1]),
    }.items():
        kept = (run / name).read_text()
        (run / name).write_text(spoil(kept))
        for command in (["certify", run], ["diagnose", run], ["ask", run, "q"]):
            said(*command, code=None)
        (run / name).write_text(kept)
    said("certify", run)


def calls(name: str) -> Iterator[str]:
    """Where the package imports a name of rich's console."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "rich.console" and name in [a.name for a in node.names]:
                yield str(path.relative_to(PACKAGE))


def test_no_command_has_another_console() -> None:
    assert not set(calls("Console")), "all print through common/consoles.py"
