"""The house rules: who may import whom, what imports without torch, how long things may be."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "teamtr_lora"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if PACKAGE / "docs" not in path.parents)  # examples are users' code
# The rooms, from the ground up, and the rooms that each of them imports. The table is exact: a tie that is not here is refused,
# and one that is gone from the code has to go from here.
TIES = {
    "common": "",
    "algorithm": "",
    "team": "common",
    "base": "common",
    "tasks": "common team",
    "recipe": "common algorithm tasks",
    "runs": "common team base recipe",
    "registry": "common base recipe runs",
    "rollout": "common team base tasks recipe",
    "evaluation": "common team tasks recipe runs rollout registry",
    "training": "common algorithm team base tasks recipe runs rollout registry evaluation",
    "study": "common algorithm team base recipe runs",
    "swap": "common algorithm team base tasks recipe runs rollout registry evaluation training",
    "baselines": "common team base tasks recipe runs rollout evaluation training",
    "report": "common runs study",
    "cli": "common tasks recipe rollout registry evaluation training study swap baselines report",
    "__main__": "cli",
}
# Ties to a room further up. None is to be added.
UPWARD: set[tuple[str, str]] = set()
# Names that files of two rooms have. None is to be added.
NAMED_TWICE: set[str] = set()


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> list[tuple[int, str]]:
    """(line, room) of every import of ours, wherever it stands: in a function or under TYPE_CHECKING counts too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found += [(node.lineno, name.split(".")[1]) for name in names if name.startswith("teamtr_lora.")]
    return [(line, name) for line, name in found if name != "__version__"]


@cache
def ties() -> dict[str, dict[str, list[str]]]:
    """By room, the other rooms that it imports, and the lines that do."""
    found: dict[str, dict[str, list[str]]] = {room(path): {} for path in FILES if path != PACKAGE / "__init__.py"}
    for path in FILES:
        for line, other in imported(path) if path != PACKAGE / "__init__.py" else ():
            if other != room(path):
                found[room(path)].setdefault(other, []).append(f"{path}:{line}")
    return found


def tied_pairs() -> int:
    """How many pairs of rooms know each other, in either direction; the program's entry is no room."""
    return len({frozenset((here, there)) for here, others in ties().items() for there in others if here != "__main__"})


def test_every_room_is_in_the_table() -> None:
    assert ties().keys() == TIES.keys()


@pytest.mark.parametrize("here", TIES)
def test_a_room_imports_exactly_the_rooms_that_the_table_says(here: str) -> None:
    found, allowed = ties()[here], set(TIES[here].split())
    forbidden = {other: lines for other, lines in found.items() if other not in allowed}
    assert not forbidden, f"{here} may not import {', '.join(forbidden)}"
    assert not allowed - found.keys(), f"{here} no longer imports these: take them out of TIES"


def test_a_room_imports_only_rooms_below_it() -> None:
    order = list(TIES)
    above = {(here, other) for here in TIES for other in TIES[here].split() if order.index(other) >= order.index(here)}
    assert above == UPWARD


def test_no_more_pairs_of_rooms_are_tied_than_the_table_says() -> None:
    listed = {frozenset((here, other)) for here in TIES for other in TIES[here].split() if here != "__main__"}
    assert tied_pairs() <= len(listed)


def test_no_two_files_of_different_rooms_have_one_name() -> None:
    rooms: dict[str, set[str]] = {}
    for path in FILES:
        if path.stem != "__init__":
            rooms.setdefault(path.stem, set()).add(room(path))
    assert {name for name, homes in rooms.items() if len(homes) > 1} == NAMED_TWICE


@pytest.mark.parametrize("module", ["teamtr_lora", "teamtr_lora.recipe", "teamtr_lora.team", "teamtr_lora.cli"])
def test_imports_without_torch(module: str) -> None:
    heavy = "{'torch', 'transformers', 'peft', 'accelerate', 'datasets', 'numpy'} & set(sys.modules)"
    code = f"import sys, {module}; found = {heavy}; assert not found, found"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_validating_a_recipe_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("team: {agents: [{name: a}]}\n")
    code = (
        "import sys; from teamtr_lora.cli import main; assert main(['validate', sys.argv[1]]) == 0; "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path / "r.yaml")], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_commands_that_only_read_files_start_without_the_training_libraries(tmp_path: Path) -> None:
    """They take seconds to import, and so does torch, for which a mistyped team need not wait."""
    code = (
        "import sys; from teamtr_lora.cli import main\n"
        "assert main(['ask', 'nowhere', 'hello']) == main(['eval', 'nowhere']) == 2 and 'torch' not in sys.modules\n"
        "codes = [main(line.split()) for line in sys.argv[1:]]\n"
        "found = {'peft', 'transformers', 'accelerate', 'datasets'} & set(sys.modules)\n"
        "assert not found and codes == [0, 2, 2, 2], (found, codes)"
    )
    lines = ["adapters list", "adapters show nobody", "diagnose nowhere", "certify nowhere"]
    result = subprocess.run([sys.executable, "-c", code, *lines], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_public_names_are_there() -> None:
    import teamtr_lora

    for name in teamtr_lora.__all__:
        assert getattr(teamtr_lora, name).__name__ == name
    with pytest.raises(AttributeError, match="no_such_name"):
        teamtr_lora.no_such_name  # noqa: B018


def test_no_file_and_no_function_has_grown_two_jobs() -> None:
    long = [f"{path}: {n} lines" for path in FILES if (n := len(path.read_text().splitlines())) > 400]
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > 60:
                    long.append(f"{path}:{node.lineno} {node.name}: {length} lines")
    assert not long
