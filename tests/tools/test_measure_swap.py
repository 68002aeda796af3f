"""tools/measure_swap.py: what its verdicts mean. The experiment itself takes minutes a seed and is the tool's."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def seed(direct: float, aligned: float, trained_on: float, *, reached: bool = True) -> dict[str, Any]:
    reading = {"mean": 0.01, "standard_error": 0.001, "bound": 0.012}
    return {
        "kl_before": reading,
        "kl_after": reading,
        "delta_align": 0.02,
        "reached": reached,
        "steps": 20,
        "accuracy": {"before": 0.9, "direct": 0.9 - direct, "aligned": 0.9 - aligned},
        "lost_direct": {"lost": direct, "standard_error": 0.02},
        "lost_aligned": {"lost": aligned, "standard_error": 0.01},
        "trained": 0.9,
        "trained_on": trained_on,
        "trained_on_noise": 0.02,
        "seconds": 1.0,
    }


def test_each_verdict_can_fail_alone(tool: Callable[[str], ModuleType]) -> None:
    verdicts = tool("measure_swap").verdicts
    good = [seed(0.2, 0.04, 0.9), seed(0.12, 0.03, 0.91), seed(0.16, 0.05, 0.89)]
    assert all(verdicts(good).values())
    wrong = {
        "stage0_reaches_its_radius": [*good[:2], seed(0.16, 0.05, 0.89, reached=False)],
        "aligned_loses_at_most_a_quarter": [seed(0.2, 0.06, 0.9)] * 3,
        "training_on_reaches_what_it_had": [seed(0.2, 0.02, 0.87)] * 3,  # 0.03 below, of a noise of 0.02 / sqrt(3)
    }
    for name, seeds in wrong.items():
        assert [key for key, ok in verdicts(seeds).items() if not ok] == [name]
    assert not verdicts([seed(-0.01, -0.01, 0.9)] * 3)["direct_loses"]


def test_the_table_has_a_line_a_seed_and_every_verdict(tool: Callable[[str], ModuleType]) -> None:
    module = tool("measure_swap")
    seeds = {"0": seed(0.2, 0.04, 0.9), "7": seed(0.1, 0.09, 0.9)}
    report = {"agent": "solver", "with": "fresh", "seeds": seeds, "verdicts": module.verdicts(list(seeds.values()))}
    lines = module.table(report).splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["0", "7"] and "+0.2000+-0.0200" in lines[2]
    assert "aligned loses at most a quarter: NO" in lines and len(lines) == 4 + len(report["verdicts"])


@pytest.fixture
def measured(tool: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seeds that were measured, in no time."""
    seeds: list[int] = []

    def measure(args: argparse.Namespace, number: int) -> dict[str, Any]:
        seeds.append(number)
        return seed(0.2, 0.04, 0.9)

    monkeypatch.setattr(tool("measure_swap"), "measure", measure)
    return seeds


def test_results_of_other_arguments_are_refused_before_anything_is_trained(
    tool: Callable[[str], ModuleType], measured: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main, out = tool("measure_swap").main, ["--out", str(tmp_path)]
    for _ in range(2):
        assert main([*out, "--seeds", "1"]) == 0, "the same command goes on"
    for other, words in (
        (["--agent", "checker"], "agent = 'solver', not 'checker'"),
        (["--with", "fresh:rank=4"], "not 'fresh:rank=4'"),
        (["--items", "8"], "items = 512, not 8"),
        (["training.stages=3"], "overrides = [], not ['training.stages=3']"),
    ):
        measured.clear()
        capsys.readouterr()
        assert main([*out, "--seeds", "1", *other]) == 2 and not measured
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line and ": was measured with" in line and "choose another --out" in line
    assert json.loads((tmp_path / "arguments.json").read_text())["items"] == 512


def test_without_stage0_there_is_nothing_to_measure(
    tool: Callable[[str], ModuleType], measured: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool("measure_swap").main(["--out", str(tmp_path / "out"), "swap.stage0=false"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "swap.stage0 = false" in line and not measured and not (tmp_path / "out").exists()
