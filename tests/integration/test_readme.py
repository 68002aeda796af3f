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
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert 0 <= float(done.stdout.split()[-1]) <= 1
    assert (tmp_path / "runs" / "team" / "team.json").exists()


def test_every_command_in_the_table_exists() -> None:
    named = set(re.findall(r"^\| `(\w+) ", README, re.M))
    actions = next(a for a in build_parser()._actions if a.dest == "command")
    assert actions.choices is not None and named == set(actions.choices)


def test_both_first_commands_are_there() -> None:
    for script in re.findall(r"^bash (tools/\w+)", README, re.M):
        assert (ROOT / script).is_file()
