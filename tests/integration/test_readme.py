"""The README's Python example runs as it stands, and its commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from teamtr_lora.cli import build_parser

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_python_example_runs(tmp_path: Path) -> None:
    """With one small stage instead of its own, which take a minute."""
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    sizes = "stages=4, items_per_stage=32"
    assert sizes in code
    code = code.replace(sizes, "stages=1, items_per_stage=8")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    said = re.fullmatch(r"held-out accuracy (\S+) -> (\S+); the run is in runs/team\n", done.stdout)
    assert said and all(0.3 < float(accuracy) < 1 for accuracy in said.groups()), "the untrained base gets some right, not all"
    assert (tmp_path / "runs" / "team" / "team.json").exists()


def test_every_command_in_the_table_exists() -> None:
    named = set(re.findall(r"^\| `(\w+) ", README, re.M))
    actions = next(a for a in build_parser()._actions if a.dest == "command")
    assert actions.choices is not None and named == set(actions.choices)


def test_both_first_commands_are_there() -> None:
    for script in re.findall(r"^bash (tools/\w+)", README, re.M):
        assert (ROOT / script).is_file()
