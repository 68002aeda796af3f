"""Dotted paths to the user's own Python."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from teamtr_lora.code_paths import load_callable
from teamtr_lora.errors import UserError


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


def test_an_installed_module() -> None:
    assert load_callable("yaml:safe_load", key="k")("[1]") == [1]
    assert load_callable("yaml.safe_load", key="k")("[1]") == [1]


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
    with pytest.raises(UserError, match=r"cannot import 'no_such_module_here'"):
        load_callable("no_such_module_here:f", key="k", folder=folder)
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
    with pytest.raises(UserError, match="task.reward"):
        load_callable("breaks_on_import:f", key="task.reward")
