"""tools/mutants.py: its table fits the code as it is, and it tells what tests notice from what they do not."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import mutants
import pytest

TABLE = list(mutants.read_table(mutants.TABLE.read_text()))
MADE_UP = """
# a square root of two, and what is left of it
== teamtr_lora/root.py
   tests/test_root.py
no root
- return x**0.5
+ return x

# nobody asks for roots of negative numbers
no sign
- assert x >= 0
+ assert True

== teamtr_lora/root.py
   tests/test_root.py
   tests/test_import.py
cannot be imported
- def root(x):
+ def root(x) ->:
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    files = {
        "teamtr_lora/__init__.py": "",
        "teamtr_lora/root.py": "def root(x):\n    assert x >= 0\n    return x**0.5\n",
        "tests/test_root.py": "from teamtr_lora.root import root\n\n\ndef test_root():\n    assert abs(root(2) - 1.414) < 1e-3\n",
        "tests/test_import.py": "def test_import():\n    import teamtr_lora.root\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_every_text_stands_exactly_once_in_its_file_and_every_test_file_exists() -> None:
    assert len(TABLE) >= 45
    for mutant in TABLE:
        assert (mutants.ROOT / mutant.file).read_text().count(mutant.text) == 1, f"{mutant.name}: {mutant.text}"
        assert mutant.text != mutant.instead, mutant.name
        for test in mutant.tests:
            file, _, function = test.partition("::")
            assert f"def {function}" in (mutants.ROOT / file).read_text(), f"{mutant.name}: {test}"
    assert [name for name, count in Counter(mutant.name for mutant in TABLE).items() if count > 1] == []


def test_what_tests_notice_is_caught_and_nothing_else(package: Path) -> None:
    """The copy is put right after each one, and the package itself is never touched."""
    before = (package / "teamtr_lora" / "root.py").read_text()
    made_up = list(mutants.read_table(MADE_UP))
    assert [mutant.words for mutant in made_up] == ["no root", "no sign", "cannot be imported"]
    found = [outcome.outcome for outcome in mutants.study([*made_up, made_up[1]], package, workers=2, seconds=60)]
    assert found == ["caught", "SURVIVED", "BROKEN", "SURVIVED"]
    assert (package / "teamtr_lora" / "root.py").read_text() == before
    (package / "tests" / "test_import.py").write_text("def test_import():\n    assert False\n")
    with pytest.raises(RuntimeError, match="fail before anything is made wrong"):
        list(mutants.study(made_up, package))
    with pytest.raises(ValueError, match="0 times in teamtr_lora/__init__.py"):
        mutants.Mutant(words="", file="teamtr_lora/__init__.py", text="x", instead="y", tests=()).put_into(package)


def test_tests_that_take_too_long_show_nothing(package: Path) -> None:
    (package / "tests" / "test_root.py").write_text("import time\n\n\ndef test_root():\n    time.sleep(60)\n")
    assert mutants.judged(next(mutants.read_table(MADE_UP)), package, 0.01).outcome == "BROKEN"


def test_the_command_counts_and_fails_where_one_survives(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (package / "table.txt").write_text(MADE_UP)
    monkeypatch.setattr(mutants, "ROOT", package)
    monkeypatch.setattr(mutants, "TABLE", package / "table.txt")
    assert mutants.main(["--list"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "root: no root (tests/test_root.py)"
    assert mutants.main(["--only", "root: no *", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["tried"], found["caught"], found["mutants"][1]["outcome"]) == (2, 1, "SURVIVED")
    monkeypatch.setattr(mutants, "study", lambda chosen, *_, **__: [mutants.Outcome(mutant="x", outcome="caught", seconds=1.0)])
    assert mutants.main(["--only", "*no root"]) == 0
    assert capsys.readouterr().out.splitlines() == ["caught       1.0 s  x", "1 mutants, 1 caught, 0 not, 0.0 minutes"]
    with pytest.raises(SystemExit):
        mutants.main(["--only", "nothing"])


def test_a_table_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ValueError, match="not a mutant"):
        list(mutants.read_table("== a.py\n   tests/b.py\nwords\n- text\nmore"))
