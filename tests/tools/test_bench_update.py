"""tools/bench_update.py: its counts, and that it goes on from what it has."""

import argparse
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from forked import ForkedPython

from teamtr_lora.base.segment_attention import Segments
from teamtr_lora.study.plan import make_plan


@pytest.fixture(scope="module")
def bench(tool: Callable[[str], ModuleType]) -> ModuleType:
    return tool("bench_update")


def test_operations_are_those_of_the_products(bench: ModuleType) -> None:
    linear = SimpleNamespace(in_features=10, out_features=20)
    facts = SimpleNamespace(linears=[linear, linear], heads=2, head_dim=4, layers=1, vocab_size=50, hidden_size=8)
    rows = SimpleNamespace(ids_B_T=torch.zeros(3, 6), segments=None)
    batch = SimpleNamespace(microbatches=[SimpleNamespace(rows=rows)], tokens=7)
    weights, adapters, pairs = 400, 2 * 30 * 2, 3 * 36 / 2
    wanted = 18 * (4 * weights + 14 * adapters) + 3.5 * 4 * pairs * 8 + 7 * 4 * 50 * 8
    assert bench.operations(facts, batch, 2) == wanted


def test_pairs_of_rows_that_lie_end_to_end(bench: ModuleType) -> None:
    """Two openings of 3 and 2, a lone sequence of 4, and rests of 5 and 1 and of 6."""
    segments = Segments.of([(0, 0), (0, 0), (0, 0), (0, 3), (0, 3), (3, 5)], [3, 2, 4, 5, 1, 6])
    wanted = (9 + 4 + 16 + 25 + 1 + 36) / 2 + 3 * 6 + 2 * 6
    assert bench.attention_pairs(SimpleNamespace(segments=segments)) == wanted


def test_a_part_is_measured_once(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--prompts", "2", "--group", "2", "--repeats", "1", "--rank", "2", "--sizes", "60", "--message-tokens", "6"]
    monkeypatch.setattr(sys, "argv", [bench.__file__, *sizes, "--out", str(tmp_path)])
    monkeypatch.setattr(subprocess, "Popen", ForkedPython)
    assert bench.main() == 0
    found = json.loads((tmp_path / "passes.json").read_text())
    assert set(found) == {"auto", "60"}
    assert found["auto"]["tokens_per_microbatch"] == 1024 and found["auto"]["microbatches"] == 1
    assert found["60"]["microbatches"] > 1 and found["60"]["tokens"] == found["auto"]["tokens"] == 4 * (32 + 6)
    capsys.readouterr()
    args = argparse.Namespace(child="passes:auto;60", budget=None)
    monkeypatch.setattr(bench, "drawn_episodes", lambda *_: [])
    monkeypatch.setattr(bench, "opened", lambda _: SimpleNamespace(base=SimpleNamespace(folder=None, device=torch.device("cpu"))))
    monkeypatch.setattr(bench, "recipe_of", lambda *_, **__: None)
    monkeypatch.setattr(bench, "base_facts", lambda _: None)
    args.__dict__ |= {"prompts": 1, "message_tokens": 1, "prompt_tokens": 1, "sizes": [60]}
    bench.child(args)
    assert capsys.readouterr().out == ""


def test_the_driver_is_read_beside_what_plan_says(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The most of several readings, by a device that is stood in for."""
    args = argparse.Namespace(base="nano", rank=2, group=2, engine="transformers", memory_share=0.3, passes=1,
                              learning_rate=1e-3, settings=["base.device=cpu"])  # fmt: skip
    recipe = bench.recipe_of(args, agents=2, prompts=2, tokens=4)
    readings, over = iter([40, 10, 30]), threading.Event()

    def free() -> tuple[int, int]:
        left = next(readings, None)
        if left is None:
            over.set()
        return (30 if left is None else left) * 2**30, 100 * 2**30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    with bench.whole_memory(recipe) as found:
        assert over.wait(timeout=30)
    assert found["driver_gib"] == 90
    planned = make_plan(recipe).memory_total_bytes / 2**30  # of which this process, on a CPU
    assert found["plan_gib"] == pytest.approx(planned, rel=0.1) and found["plan_over_driver"] == found["plan_gib"] / 90
