"""How many processes train on a CPU: by cores, free memory and the base."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from teamtr_lora.recipe import load_recipe
from teamtr_lora.runs.run_dir import RunDir
from teamtr_lora.runs.run_state import RunState
from teamtr_lora.training import cpu_processes as rule

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart.yaml"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is one process")


def processes(monkeypatch: pytest.MonkeyPatch, *overrides: str, cores: int = 4, gib: float = 100, resume: bool = False) -> int:
    monkeypatch.setattr(rule, "cores", lambda: cores)
    monkeypatch.setattr(rule, "free_memory", lambda: int(gib * 2**30))
    return rule.cpu_processes(load_recipe([str(QUICKSTART)], list(overrides)), "quickstart", resume=resume)


def test_a_process_a_core_where_each_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [processes(monkeypatch, cores=cores) for cores in (1, 2, 4, 64)] == [1, 2, 4, 8]
    assert [processes(monkeypatch, gib=gib) for gib in (0.5, 3, 5, 9)] == [1, 1, 2, 4]


def test_one_process_where_several_would_cost_or_change_something(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights, local = tmp_path / "model.safetensors", f"base.source={tmp_path}"
    weights.write_bytes(b"")
    assert processes(monkeypatch, local) == 4
    with weights.open("ab") as file:
        file.truncate(65 << 20)
    assert processes(monkeypatch, local) == 1, "more threads gain more than more copies"
    assert processes(monkeypatch, "base.source=nobody/knows") == 1
    assert processes(monkeypatch, "rollout.engine=vllm") == 1
    assert processes(monkeypatch, "training.optimizer=adamw_8bit") == 1
    monkeypatch.setattr(sys, "platform", "darwin")
    assert processes(monkeypatch) == 1


@pytest.mark.parametrize(("threads", "expected"), [(0, 4), (1, 4), (2, 1)])
def test_a_run_of_several_threads_is_resumed_by_one_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, threads: int, expected: int
) -> None:
    """It goes on with its own number of them, which several processes would have no cores for."""
    RunDir(tmp_path).checkpoints.save(RunState(threads=threads), {})
    assert processes(monkeypatch, f"output_dir={tmp_path}", resume=True) == expected
    assert processes(monkeypatch, f"output_dir={tmp_path}") == 4


def test_limits_of_a_container_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rule.os, "sched_getaffinity", lambda _: set(range(6)))
    monkeypatch.setattr(rule, "_CONTAINER", tmp_path)
    free = rule.free_memory()
    assert rule.cores() == 6 and free > 0
    for cpu, memory in (("max 100000\n", "max\n"), ("250000 100000\n", "3000\n")):
        (tmp_path / "cpu.max").write_text(cpu)
        (tmp_path / "memory.max").write_text(memory)
        (tmp_path / "memory.current").write_text("1000\n")
        limited = memory != "max\n"
        assert rule.cores() == (2 if limited else 6)
        assert (rule.free_memory() == 2000) is limited
