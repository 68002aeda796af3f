"""tools/measure_floors.py: both readings agree with each other and with what the precisions can do."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def floors(tool: Callable[[str], ModuleType]) -> ModuleType:
    return tool("measure_floors")


def test_the_scan_is_quadratic_down_to_the_floor(floors: ModuleType, tiny_base: Path) -> None:
    readings, failed = floors.measure(str(tiny_base), "cpu", ["fp32", "bf16"], messages=3, tokens=8)
    assert not failed
    passes = {(r.base, r.name): r for r in readings}
    assert set(passes) == {(p, n) for p in ("fp32", "bf16") for n in ("training", "gate fp32")}
    strict = passes["fp32", "gate fp32"]
    constants = [strict.scan[alpha] / alpha**2 for alpha in (1e-1, 1e-2, 1e-3)]
    assert max(constants) < 1.5 * min(constants)
    assert strict.floor < 1e-9 and strict.resolves(strict) < 1e-9
    gate, training = passes["bf16", "gate fp32"], passes["bf16", "training"]
    assert training.floor > 100 * gate.floor
    resolved = training.resolves(gate)
    assert resolved is not None and resolved > 10 * gate.resolves(gate)
    assert "bf16   training" in floors.tables(readings)


def test_resolves_ends_where_the_scan_leaves_the_parabola(floors: ModuleType) -> None:
    strict = floors.PassReading("bf16", "gate fp32", 0.0, {a: 3 * a**2 for a in floors.ALPHAS})
    assert strict.resolves(strict) == 3 * min(floors.ALPHAS) ** 2
    noisy = floors.PassReading("bf16", "training", 0.0, {a: 3 * a**2 + 1e-4 for a in floors.ALPHAS})
    assert noisy.resolves(strict) == 3 * 1e-2**2 + 1e-4  # at 1e-3 the noise is 33 times the KL
    lost = floors.PassReading("bf16", "training", 0.0, {a: 3 * a**2 + 1.0 for a in floors.ALPHAS})
    assert lost.resolves(strict) is None


def test_on_a_cpu_it_says_what_it_skips(
    floors: ModuleType, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(tiny_base), "--device", "cpu", "--messages", "2", "--message-tokens", "4"]
    monkeypatch.setattr(sys, "argv", ["measure_floors.py", *arguments, "--json", str(tmp_path / "floors.json")])
    with pytest.raises(SystemExit) as ended:
        floors.main()
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "gate fp32" in text and "bf16: skipped" in text and "tf32" not in text
    saved = json.loads((tmp_path / "floors.json").read_text())
    assert [p["name"] for p in saved["passes"]] == ["training", "gate fp32"] and set(saved["skipped"]) == {"fp16", "bf16"}
    training, gate = saved["passes"]  # of a float32 base on a CPU: one and the same pass
    assert training["scan"] == gate["scan"] and 0 < training["floor"] == gate["floor"] < 1e-9
    assert [float(alpha) for alpha in gate["scan"]] == list(floors.ALPHAS)
    kls = list(gate["scan"].values())
    assert kls == sorted(kls, reverse=True) and 0 < gate["resolves"] < 1e-9


def test_a_base_that_cannot_be_loaded_is_said_not_raised(floors: ModuleType, tmp_path: Path) -> None:
    readings, failed = floors.measure(str(tmp_path / "nowhere"), "cpu", ["fp32"], messages=1, tokens=1)
    assert readings == [] and "no such folder" in failed["fp32"]


def test_messages_longer_than_the_context_are_said_not_raised(floors: ModuleType, tiny_base: Path) -> None:
    readings, failed = floors.measure(str(tiny_base), "cpu", ["fp32"], messages=1, tokens=10_000)
    assert readings == [] and "exceed the context" in failed["fp32"]
