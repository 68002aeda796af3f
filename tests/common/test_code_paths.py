"""Dotted paths to the user's own Python."""

import importlib.util
import os
import py_compile
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import teamtr_lora
from teamtr_lora.common.code_paths import load_callable, misnamed
from teamtr_lora.common.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A recipe's folder; the modules loaded from it are forgotten again."""
    before = dict(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - set(before):
        del sys.modules[name]
    sys.modules.update(before)


def test_a_file_beside_the_recipe(folder: Path) -> None:
    (folder / "mine.py").write_text("def f(x):\n    return x + 1\nclass C:\n    pass\n")
    assert load_callable("mine:f", key="k", folder=folder)(1) == 2
    assert load_callable("mine.f", key="k", folder=folder)(1) == 2
    assert load_callable("mine:C", key="k", folder=folder).__name__ == "C"


def test_a_file_in_a_subfolder(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "mod.py").write_text("def f():\n    return 'sub'\n")
    assert load_callable("sub.mod:f", key="k", folder=folder)() == "sub"


def test_the_file_beside_wins_over_an_installed_module_and_two_folders_do_not_mix(folder: Path) -> None:
    for name in ("one", "two"):
        (folder / name).mkdir()
        (folder / name / "colorsys.py").write_text(f"def f():\n    return {name!r}\n")
    assert load_callable("colorsys:f", key="k", folder=folder / "one")() == "one"
    assert load_callable("colorsys:f", key="k", folder=folder / "two")() == "two"


def test_a_file_that_hides_a_loaded_library_does_not_break_it(folder: Path) -> None:
    """A user's own json.py serves the recipe; everybody else keeps the real one."""
    import json

    (folder / "json.py").write_text("def f():\n    return 'mine'\n")
    assert load_callable("json:f", key="k", folder=folder)() == "mine"
    assert sys.modules["json"] is json


def test_a_file_may_import_its_neighbour(folder: Path) -> None:
    (folder / "helper_beside.py").write_text("VALUE = 3\n")
    (folder / "uses_helper.py").write_text("from helper_beside import VALUE\ndef f():\n    return VALUE\n")
    assert load_callable("uses_helper:f", key="k", folder=folder)() == 3


def test_neighbours_are_found_when_a_function_is_called_and_two_folders_keep_theirs(folder: Path) -> None:
    loaded = {}
    for name in ("one", "two"):
        (folder / name / "parts").mkdir(parents=True)
        (folder / name / "helper.py").write_text(f"WHO = {name!r}\n")
        (folder / name / "parts" / "late.py").write_text("import helper\nWHO = helper.WHO\n")
        body = "def score():\n    import helper, parts.late as late\n    from parts import late as again\n"
        (folder / name / "mine.py").write_text(body + "    return helper.WHO, late.WHO, again.WHO\n")
        loaded[name] = load_callable("mine:score", key="task.reward", folder=folder / name)
    assert {name: score() for name, score in loaded.items()} == {"one": ("one",) * 3, "two": ("two",) * 3}
    assert "helper" not in sys.modules and "parts" not in sys.modules


def test_an_installed_package_that_the_user_trusts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEAMTR_LORA_TRUST", "my_rewards, yaml")
    assert load_callable("yaml:safe_load", key="k")("[1]") == [1]
    assert load_callable("yaml.safe_load", key="k")("[1]") == [1]


@pytest.mark.parametrize("trust", ["", "yaml", "torch_", "torchvision, ,"])
def test_an_installed_package_that_nobody_trusts(folder: Path, trust: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a dataset column called command, this one would be a shell."""
    monkeypatch.setenv("TEAMTR_LORA_TRUST", trust)
    with pytest.raises(UserError) as caught:
        load_callable("torch.utils.collect_env:run", key="task.reward", folder=folder)
    assert str(caught.value) == (
        "task.reward = 'torch.utils.collect_env:run': torch is an installed package, and a stranger's recipe could name any "
        "function of it; put torch/utils/collect_env.py beside the recipe, or set TEAMTR_LORA_TRUST=torch if the package is yours"
    )


@pytest.mark.parametrize(
    "path", ["os:system", "subprocess:getoutput", "teamtr_lora.common.files:write_atomic", "teamtr_lora:main"]
)
def test_trust_covers_neither_python_nor_this_package(path: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEAMTR_LORA_TRUST", "os,subprocess,teamtr_lora")
    with pytest.raises(UserError, match=r"part of Python itself|own functions cannot be named"):
        load_callable(path, key="task.reward", folder=folder)


def test_trust_is_a_list_of_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEAMTR_LORA_TRUST", "yaml.nodes")
    with pytest.raises(UserError, match=r"TEAMTR_LORA_TRUST = 'yaml.nodes': must be names of packages"):
        load_callable("yaml:safe_load", key="k")


@pytest.mark.parametrize("name", ["getoutput", "Popen", "run", "load", "loader", "subprocess", "__class__"])
def test_what_a_file_imports_is_not_its_own(folder: Path, name: str) -> None:
    (folder / "takes.py").write_text(
        "import subprocess\nfrom subprocess import getoutput, Popen\nfrom torch.utils.collect_env import run\n"
        "from yaml import safe_load as load\nfrom yaml import SafeLoader as loader\n"
    )
    with pytest.raises(UserError, match=r"comes from|written in Python") as caught:
        load_callable(f"takes:{name}", key="task.reward", folder=folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["takes2:subprocess.getoutput", "takes2.subprocess:getoutput", "takes2.subprocess.getoutput",
                                  "takes2..subprocess:getoutput", "takes2:..subprocess", ".takes2:subprocess"])  # fmt: skip
def test_no_path_leads_through_a_module(folder: Path, path: str) -> None:
    (folder / "takes2.py").write_text("import subprocess\n")
    with pytest.raises(UserError, match="task.reward = "):
        load_callable(path, key="task.reward", folder=folder)


def test_a_trusted_package_does_not_hand_on_what_it_imports(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not where one of its names is Python's own module, as six.moves has them."""
    package = folder / "packages" / "trusted_here"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import subprocess, sys\nfrom subprocess import getoutput\nsys.modules['trusted_here.moves'] = subprocess\n"
        "def own():\n    return 4\n"
    )
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("TEAMTR_LORA_TRUST", "trusted_here")
    assert load_callable("trusted_here:own", key="k", folder=folder / "recipes")() == 4
    for path in ("trusted_here:getoutput", "trusted_here.moves:getoutput"):
        with pytest.raises(UserError, match="comes from subprocess"):
            load_callable(path, key="k", folder=folder / "recipes")


def test_a_link_to_an_installed_file_or_a_recipe_among_them_makes_it_nobodys_own(folder: Path) -> None:
    import subprocess

    import yaml

    library, packages = Path(subprocess.__file__).parent, Path(yaml.__file__).parent.parent
    (folder / "mine.py").symlink_to(library / "subprocess.py")
    (folder / "linked").symlink_to(packages / "yaml")
    for path, place in [("mine:getoutput", folder), ("subprocess:getoutput", library), ("linked.nodes:Node", folder),
                        ("yaml.nodes:Node", packages)]:  # fmt: skip
        with pytest.raises(UserError, match=r"part of Python itself|is an installed package"):
            load_callable(path, key="k", folder=place)


def test_what_a_module_prints_and_its_exit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stdout may be one JSON object; an exit would end the command as if all were well."""
    (folder / "chatty.py").write_text("print('loaded')\ndef f():\n    return 1\n")
    assert load_callable("chatty:f", key="k", folder=folder)() == 1
    assert capsys.readouterr() == ("", "loaded\n")
    (folder / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(UserError, match=r"^k = 'leaves:f': cannot import 'leaves' \(it called sys.exit\(0\)\)$"):
        load_callable("leaves:f", key="k", folder=folder)


@pytest.mark.parametrize("path", ["", "f", ":", "mod:", ":f", "a b:f", "../x:f", "mod:f()", "os;import:f", "mod:a.b", "/etc:f"])
def test_not_a_dotted_path(path: str, folder: Path) -> None:
    with pytest.raises(UserError, match="task.reward"):
        load_callable(path, key="task.reward", folder=folder)


@pytest.mark.parametrize("path", ["os:system", "builtins:eval", "subprocess:getoutput", "pty:spawn", "os.path:join"])
def test_pythons_own_library_is_refused(path: str) -> None:
    """With a dataset column called cmd, subprocess:getoutput would be a shell."""
    with pytest.raises(UserError, match="part of Python itself"):
        load_callable(path, key="task.reward")


def test_only_what_is_written_in_python_and_can_be_called(folder: Path) -> None:
    (folder / "values.py").write_text("text = 'a'\nsize = len\n")
    for name in ("text", "size"):
        with pytest.raises(UserError, match="written in Python"):
            load_callable(f"values:{name}", key="task.reward", folder=folder)


def test_missing_module_and_missing_name(folder: Path) -> None:
    absent = f"cannot import it: there is no no_such_module_here.py beside the recipe, in {folder.resolve()}; write that file"
    with pytest.raises(UserError, match=re.escape(absent)):
        load_callable("no_such_module_here:f", key="k", folder=folder)
    moved = f"the recipe's folder {folder / 'old'} is not there; if it has moved, .* train NEW/recipe.yaml --run-dir RUN --resume"
    with pytest.raises(UserError, match=moved):
        load_callable("no_such_module_here:f", key="k", folder=folder / "old")
    (folder / "mine2.py").write_text("def g(): ...\nfrom os import path\n")
    with pytest.raises(UserError, match=r"has no 'f'; it defines g$"):
        load_callable("mine2:f", key="k", folder=folder)


@pytest.mark.parametrize("body", ["def f(:\n", "import no_such_library\n", "raise RuntimeError('no')\n", "1 / 0\n"])
def test_a_module_that_cannot_be_imported_is_the_users_to_fix(folder: Path, body: str) -> None:
    (folder / "broken_mod.py").write_text(body)
    with pytest.raises(UserError, match="task.reward") as caught:
        load_callable("broken_mod:f", key="task.reward", folder=folder)
    assert "broken_mod" in str(caught.value) and "\n" not in str(caught.value)
    assert "broken_mod" not in sys.modules
    (folder / "broken_mod.py").write_text("def f():\n    return 1\n")
    os.utime(folder / "broken_mod.py", (1, 1))
    assert load_callable("broken_mod:f", key="task.reward", folder=folder)() == 1, "fixed and tried again"


def test_an_installed_module_that_breaks_on_import_is_the_users_to_fix(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "breaks_on_import.py").write_text("raise RuntimeError('no')\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("TEAMTR_LORA_TRUST", "breaks_on_import")
    with pytest.raises(UserError, match=r"task.reward.*cannot import 'breaks_on_import' \(no\)"):
        load_callable("breaks_on_import:f", key="task.reward")


@pytest.mark.parametrize(("neighbour", "current"), [(False, False), (True, False), (True, True)])
def test_what_runs_is_what_the_file_says_whatever_was_compiled_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch, neighbour: bool, current: bool
) -> None:
    """A folder can bring compiled files of its own, which Python would take without looking at the source. `current`: Python was
    started there with -m."""
    if current:
        monkeypatch.syspath_prepend(str(folder))
    honest, other = folder / "honest.py", folder / "other.py"
    honest.write_text("def score(**_):\n    return 'as written'\n")
    other.write_text("def score(**_):\n    return 'otherwise'\n")
    compiled = importlib.util.cache_from_source(str(honest))
    py_compile.compile(str(other), compiled, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    (folder / "mine.py").write_text("import honest\ndef score(**_):\n    return honest.score()\n")
    assert load_callable("mine:score" if neighbour else "honest:score", key="task.reward", folder=folder)() == "as written"


def test_a_package_beside_the_recipe_imports_its_own_parts(folder: Path) -> None:
    (folder / "tr_parts" / "inner").mkdir(parents=True)
    (folder / "tr_parts" / "__init__.py").write_text("SIZE = 2\n")
    (folder / "tr_parts" / "inner" / "deep.py").write_text("from tr_parts import SIZE\n")
    (folder / "mine.py").write_text(
        "import json\nfrom tr_parts.inner.deep import SIZE\ndef score(**_):\n    return json.dumps(SIZE)\n"
    )
    assert load_callable("mine:score", key="task.reward", folder=folder)() == "2"


def test_an_environment_beside_the_recipe_is_pythons_own_affair(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = folder / ".venv" / "lib" / "site-packages"
    (packages / "tr_installed").mkdir(parents=True)
    (packages / "tr_installed" / "__init__.py").write_text("")
    (packages / "tr_installed" / "part.py").write_text("")
    (folder / "tr_installed.py").write_text("raise RuntimeError('a neighbour in place of a package')\n")
    (folder / "mine.py").write_text(
        "import tr_installed.part as part\ndef score(**_):\n    return type(part.__loader__).__name__\n"
    )
    monkeypatch.syspath_prepend(str(packages))
    assert load_callable("mine:score", key="task.reward", folder=folder)() == "SourceFileLoader"


@pytest.mark.parametrize("room", ["", "common", "tasks/machinery"])
def test_no_folder_of_this_package_makes_its_functions_the_users_own(room: str) -> None:
    folder = Path(teamtr_lora.__file__).parent / room
    module = next(path.stem for path in sorted(folder.glob("*.py")))
    wrong = misnamed(f"{module}:anything", folder)
    assert wrong is not None and "teamtr_lora's own functions cannot be named" in wrong[0]
