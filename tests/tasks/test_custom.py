"""Environments of the user's own: named by a recipe, passed by a script, offered by a package; mistakes are one line each."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from teamtr_lora import Item, Task, TeamTRTrainer, UserError
from teamtr_lora.cli import main
from teamtr_lora.evaluation.contents import code_hashes
from teamtr_lora.recipe import Recipe, RecipeError, check_named, load_recipe
from teamtr_lora.recipe.named import named_code
from teamtr_lora.registry.local_keys import local_paths

ENVIRONMENT = """
from teamtr_lora import Item, Task

class Doubling(Task):
    def __init__(self, largest):
        self.largest = largest

    def items(self, split):
        return [Item(f"{split}-{n}", f"{n}+{n}", {"answer": str(2 * n)}) for n in range(self.largest)]

def make_task(largest=4):
    return Doubling(largest)

def numbers(size): return [1, 2]
def a_class(): return Doubling
def nothing(): return Task()
def empty(): return Doubling(0)
def breaks(): return 1 / 0

class Rich(Doubling):
    reward_range = (0.0, 3.0)

    def __init__(self):
        super().__init__(4)

class Odd(Rich):
    def items(self, split): return ["a text"]

class Stream(Rich):
    def items(self, split): return iter([])
"""


def recipe_of(folder: Path, function: str, **keys: Any) -> Recipe:
    (folder / "my_env.py").write_text(ENVIRONMENT)
    task = {"name": "custom", "callable": function, **keys}
    return Recipe.model_validate({"team": {"agents": [{"name": "a"}]}, "task": task}).placed_in(folder)


def test_a_recipe_names_it_and_gives_it_settings(tmp_path: Path) -> None:
    task = recipe_of(tmp_path, "my_env:make_task", settings={"largest": 7}).task.build(tmp_path)
    assert task.items("train").size == 7 and task.items("test")[3].prompt == "3+3"
    assert recipe_of(tmp_path, "my_env:Doubling", settings={"largest": 2}).task.build(tmp_path).items("train").size == 2


@pytest.mark.parametrize(
    ("function", "keys", "said"),
    [
        ("make_task", {"settings": {"largst": 7}}, "settings.largst = 7: make_task has no such setting; did you mean 'largest'?"),
        ("make_task", {"settings": {"x": 7}}, "task.settings.x = 7: make_task has no such setting; it takes largest"),
        ("numbers", {}, "task.settings: numbers cannot be called without size; it takes size"),
        ("numbers", {"settings": {"size": 1}}, "it returned list; a task is an object of a subclass of teamtr_lora.Task"),
        ("a_class", {}, "it returned the class Doubling; give a task made of it, Doubling(...)"),
        ("nothing", {}, "it returned a Task, which defines no items(split)"),
        ("empty", {}, "Doubling.items('train') has 0 items"),
        ("breaks", {}, "task.callable = 'my_env:breaks': raised ZeroDivisionError: division by zero (my_env.py line 18)"),
        ("Rich", {}, "task.reward_range = [0.0, 1.0]: the task says [0, 3]; set task.reward_range to that"),
        ("Odd", {"reward_range": [0, 3]}, "Odd.items('train') holds str; it must hold teamtr_lora.Item"),
        ("Stream", {"reward_range": [0, 3]}, "Stream.items('train') returned list_iterator, which has no size; return a list"),
        ("gone", {}, "my_env has no 'gone'; it defines"),
    ],
)
def test_mistakes_of_a_recipe_are_one_line(function: str, keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        recipe_of(tmp_path, f"my_env:{function}", **keys).task.build(tmp_path)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_validate_finds_a_missing_function_without_running_the_file(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "my_env:maketask")
    (tmp_path / "my_env.py").write_text("print('run')\nopen('ran', 'w')\ndef make_task(): ...\n")
    with pytest.raises(RecipeError, match=r"task\.callable = 'my_env:maketask': my_env has no 'maketask'; it defines make_task"):
        check_named(recipe, "r.yaml")
    assert not (tmp_path / "ran").exists()
    for given, said in (({}, "a custom task needs a function"), ({"callable": "a b"}, "module:function, or the name of a task")):
        file = tmp_path / "r.yaml"
        file.write_text(f"team: {{agents: [{{name: a}}]}}\ntask: {json.dumps({'name': 'custom', **given})}\n")
        with pytest.raises(RecipeError, match=said):
            load_recipe(file)


def test_its_code_is_known_as_code(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "my_env:make_task")
    assert named_code(recipe.model_dump()) == {"task.callable": "my_env:make_task"}
    paths = recipe_of(tmp_path, "my_env:make_task", settings={"data": "/home/me/rows", "word": "blue", "n": 1})
    assert local_paths(paths.model_dump()) == {"task.settings.data": "/home/me/rows"}
    before = code_hashes(recipe)
    other = tmp_path / "other"
    other.mkdir()
    changed = recipe_of(other, "my_env:make_task")
    (other / "my_env.py").write_text(ENVIRONMENT + "# changed\n")
    assert before.keys() == {"task.callable"} and code_hashes(changed) != before


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package vault_pkg that offers the task `vault`."""
    place = tmp_path / "site-packages"
    (place / "vault_pkg-1.0.dist-info").mkdir(parents=True)
    (place / "vault_pkg-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vault-pkg\nVersion: 1.0\n")
    (place / "vault_pkg-1.0.dist-info" / "entry_points.txt").write_text("[teamtr_lora.tasks]\nvault = vault_pkg:make_task\n")
    (place / "vault_pkg.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(str(place))
    yield
    sys.modules.pop("vault_pkg", None)


@pytest.mark.usefixtures("package")
def test_a_package_offers_a_task_where_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_of(tmp_path, "vault", settings={"largest": 3})
    monkeypatch.delenv("TEAMTR_LORA_TRUST", raising=False)
    for act in (lambda: recipe.task.build(tmp_path), lambda: check_named(recipe, "r.yaml")):
        with pytest.raises(UserError, match=r"vault_pkg is an installed package.* set TEAMTR_LORA_TRUST=vault_pkg") as error:
            act()
        assert "\n" not in str(error.value)
    assert main(["tasks", "list", "--json"]) == 0 and "vault" not in capsys.readouterr().out
    assert "vault_pkg" not in sys.modules, "nothing of it was run"
    monkeypatch.setenv("TEAMTR_LORA_TRUST", "vault_pkg")
    check_named(recipe, "r.yaml")
    assert recipe.task.build(tmp_path).items("train").size == 3
    assert main(["tasks", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[-1]["name"] == "vault"
    with pytest.raises(UserError, match="no installed package offers a task 'vualt'"):
        recipe_of(tmp_path, "vualt").task.build(tmp_path)


class Listed(Task):
    def items(self, split: str) -> Any:
        return [Item("a", "1+1"), Item("b", "2+2")]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"task": Listed(), "reward_funcs": len, "train_dataset": []}, "task: reward_funcs, train_dataset given too"),
        ({"task": Listed(), "success_at_least": 0.5}, "task: success_at_least given too"),
        ({"task": Listed}, "task: got the class Listed; give a task made of it, Listed(...)"),
        ({"task": "column_sum"}, "task: got str; a task is an object of a subclass of teamtr_lora.Task"),
        ({"task": Task()}, "task: got a Task, which defines no items(split)"),
        ({}, "train_dataset: give a datasets.Dataset or a list of dicts with a 'prompt' column, or task="),
    ],
)
def test_mistakes_of_a_script_are_one_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        TeamTRTrainer(team={"agents": [{"name": "a"}]}, **given)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_script_passes_its_task() -> None:
    class Rich(Listed):
        reward_range = (0.0, 2.0)

    trainer = TeamTRTrainer(team={"agents": [{"name": "a"}]}, task=Rich())
    assert trainer.recipe.task.model_dump() == {"on_reward_error": "stop", "reward_range": (0.0, 2.0), "name": "script"}
    assert trainer.task.items("test").size == 2


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([Item("a", "1"), Item("b", "2"), Item("a", "3")], "two items with the id 'a'"),
        ([Item("a", "1"), "b"], "holds str; it must hold teamtr_lora.Item"),
        ([Item("a", 3)], "must be texts"),  # type: ignore[arg-type]
    ],
)
def test_items_are_looked_at_before_a_base_is_loaded(items: list[Any], words: str) -> None:
    class Mine(Task):
        def items(self, split: str) -> list[Any]:  # type: ignore[override]
            return items

    with pytest.raises(UserError, match=words):
        TeamTRTrainer(team={"agents": [{"name": "a"}]}, task=Mine())


def test_paths_are_found_however_deep_settings_hold_them() -> None:
    settings = {"deep": {"key": ["x", {"y": "/home/me/secret"}]}, "list": ["/home/me/l"], "a.b": "/home/me/x", "fine": {"n": "w"}}
    found = local_paths({"task": {"name": "custom", "callable": "m:f", "settings": settings}})
    assert found == {
        "task.settings.deep": "/home/me/secret",
        "task.settings.list": "/home/me/l",
        "task.settings.a.b": "/home/me/x",
    }
