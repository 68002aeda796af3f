"""tools/bench_trl.py: both sides make their updates on the embedded base, and a pair that is there is not run again."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from forked import ForkedPython

TINY = ["--prompts", "4", "--group", "4", "--passes", "1", "--message-tokens", "4", "--rank", "2", "--repeats", "1"]


def test_ours_and_trl_take_turns(
    tool: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench, file = tool("bench_trl"), tmp_path / "trl.json"
    import_utils = pytest.importorskip("trl.import_utils", reason="trl is not installed (tools/setup --test installs it)")
    monkeypatch.setattr(import_utils, "is_vllm_available", lambda *_, **__: False)  # TRL would import it, which takes longest
    monkeypatch.setattr(subprocess, "Popen", ForkedPython)
    monkeypatch.setattr(sys, "argv", [bench.__file__, *TINY, "--out", str(tmp_path)])
    assert bench.main() == 0
    (pair,) = json.loads(file.read_text())["pairs"].values()
    assert set(pair) == {"ours", "TRL default"} and all(len(runs) == 1 for runs in pair.values())
    ours, theirs = pair["ours"][0], pair["TRL default"][0]
    assert {"update", "rollout", "optimize", "gate", "publish"} <= set(ours) and {"update", "rollout", "optimize"} <= set(theirs)
    assert sum(ours[phase] for phase in ("rollout", "optimize", "gate")) <= ours["update"]
    table = capsys.readouterr().out
    assert f"TRL default takes {theirs['update'] / ours['update']:.2f} times as long (best)" in table
    assert "ours: 1 of 1 updates accepted" in table and "accepted" not in table.splitlines()[0]
    monkeypatch.setattr(bench, "pair", lambda *_: pytest.fail("a pair that was measured is measured again"))
    assert bench.main() == 0
    assert capsys.readouterr().out == table
