"""The house rules: who may import whom, what imports without torch, how long things may be."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "teamtr_lora"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if PACKAGE / "docs" not in path.parents)  # examples are users' code
# Lower rooms never import higher ones.
RANKS = {
    "common": 0,
    "team": 1,
    "base": 1,
    "tasks": 2,
    "recipe": 3,
    "algorithm": 0,
    "runs": 3,
    "registry": 4,
    "rollout": 5,
    "evaluation": 6,
    "training": 7,
    "study": 8,
    "swap": 8,
    "baselines": 8,
    "report": 9,
    "cli": 10,
    "__main__": 11,
}
# Rooms of one rank do not know each other.
APART = [("team", "base"), ("tasks", "algorithm"), ("tasks", "registry"), ("swap", "baselines")]


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


def test_every_room_has_a_rank() -> None:
    assert {room(path) for path in FILES} - {"__init__"} <= RANKS.keys()


@pytest.mark.parametrize("path", [p for p in FILES if p != PACKAGE / "__init__.py"], ids=lambda p: str(p.relative_to(PACKAGE)))
def test_lower_rooms_never_import_higher_ones(path: Path) -> None:
    here = room(path)
    for line, other in imported(path):
        assert other in RANKS, f"{path}:{line} imports teamtr_lora.{other}, which has no rank"
        assert RANKS[other] <= RANKS[here], f"{path}:{line}: {here} imports the higher room {other}"


@pytest.mark.parametrize(("one", "other"), APART)
def test_rooms_side_by_side_are_apart(one: str, other: str) -> None:
    for here, there in ((one, other), (other, one)):
        rows = [f"{path}:{line}" for path in FILES if room(path) == here for line, name in imported(path) if name == there]
        assert not rows


def test_algorithm_imports_nothing_of_ours_but_itself() -> None:
    for path in FILES:
        if room(path) == "algorithm":
            assert {name for _, name in imported(path)} <= {"algorithm"}, path


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
    """They take seconds to import."""
    code = (
        "import sys; from teamtr_lora.cli import main\n"
        "codes = [main(line.split()) for line in sys.argv[1:]]\n"
        "found = {'peft', 'transformers', 'accelerate', 'datasets'} & set(sys.modules)\n"
        "assert not found and codes == [0, 2, 2, 2, 2], (found, codes)"
    )
    lines = ["adapters list", "adapters show nobody", "diagnose nowhere", "certify nowhere", "ask nowhere hello"]
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
