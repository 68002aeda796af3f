"""tools/bench_start.py: a run is started, read and ended."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from forked import ForkedPython


def test_a_start_is_told_by_phase(
    tool: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = tool("bench_start")
    asked = ["--repeats", "1", "--group", "2", "base.device=cpu", "training.stages=1000"]
    monkeypatch.setattr(sys, "argv", [bench.__file__, *asked])
    monkeypatch.setattr(subprocess, "Popen", ForkedPython)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    bench.main()
    line = capsys.readouterr().out
    found = {part.rsplit(" ", 1)[0].strip(): float(part.rsplit(" ", 1)[1]) for part in line[9:].removesuffix(" s\n").split(",")}
    phases = [found[name] for name in ("process", "base", "adapters", "engine")]
    assert found["first rollout"] == pytest.approx(sum(phases), abs=0.3)  # each is told to a tenth, and a warm base takes less
    assert found["with its evaluation and floors"] > 0
