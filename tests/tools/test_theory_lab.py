"""tools/theory_lab.py: the penalties' exponents are those of their closed forms, and nothing exceeds what bounds it."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest


@pytest.fixture(scope="module")
def theory(tool: Callable[[str], ModuleType]) -> ModuleType:
    return tool("theory_lab")


def test_every_error_is_below_its_penalty(theory: ModuleType) -> None:
    for seed in range(3):
        for n in (2, 3, 5):
            row = theory.one_team(n, seed, 0.01, 0.9)
            assert set(row) == set(theory.MEANING)
            for error, penalty in (
                ("fresh error", "fresh penalty"),
                ("stale error", "stale penalty"),
                ("stale gap", "compounding penalty"),
                ("cached error", "cached penalty"),
                ("by turns error", "by turns penalty"),
                ("by turns penalty", theory.PAPERS_EPISODES),
            ):
                assert row[error] <= row[penalty] + 1e-9


def test_exponents_are_near_one_and_two(
    theory: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "lab.json"
    monkeypatch.setattr(sys, "argv", ["theory_lab.py", "--seeds", "3", "--json", str(out)])
    theory.main()
    assert "exponent in n" in capsys.readouterr().out
    rows = json.loads(out.read_text())["rows"]
    sizes = np.log(theory.SIZES)

    def closed_form(count: list[int]) -> float:
        return float(np.polyfit(sizes, np.log(count), 1)[0])

    expected = {
        "fresh penalty": 1.0,
        "stale penalty": closed_form([n * (n + 1) // 2 for n in theory.SIZES]),
        "compounding penalty": closed_form([n * (n - 1) // 2 for n in theory.SIZES]),
    }
    for name, exponent in expected.items():
        assert rows[name]["exponent"]["exponent"] == pytest.approx(exponent, abs=1e-3)
        assert rows[name]["exponent_in_delta"]["exponent"] == pytest.approx(0.5, abs=1e-3)
    assert 1.7 < expected["stale penalty"] < 1.85 < 2.3 < expected["compounding penalty"] < 2.4
    assert rows["cached penalty"]["exponent"]["exponent"] == pytest.approx(0.5, abs=0.1)
    assert rows["fresh error"]["exponent_in_delta"]["exponent"] == pytest.approx(1, abs=0.15)


def test_nonsense_is_refused_in_one_line(theory: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["theory_lab.py", "--gamma", "1"])
    with pytest.raises(SystemExit, match="gamma between 0 and 1"):
        theory.main()
