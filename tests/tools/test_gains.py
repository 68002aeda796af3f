"""tools/gains.py, on a run whose rows say what the columns are."""

from __future__ import annotations

import math
from pathlib import Path

import gains
import numpy as np
import pytest
from made_up_run import make_run, plain_rows, write_rows


def test_parts_are_means_over_their_updates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    make_run(run, 9)
    every = plain_rows(run)
    rows = [row for row in every if row["kind"] == "update"]
    rows[1]["fresh_episodes"], rows[1]["success_rate"] = 0, 0.0  # an update without a rollout of its own
    for number, row in enumerate(rows):
        row["time"] = 1000.0 + 90 * number
        row["gradient_signal"] = None if number == 4 else 0.5 - 0.1 * number
        row["surrogate_gain_in_sample"] = None if row["surrogate_gain"] is None else 0.4 + row["surrogate_gain"]
    write_rows(run, every)
    assert gains.main([str(run), "--updates", "6"]) == 0
    _, names, *lines = capsys.readouterr().out.splitlines()
    assert "".join(names.split()) == "".join("".join(gains.COLUMNS).split())
    spent = [sum(s for phase, s in row["seconds"].items() if phase not in ("probe", "diagnostics")) for row in rows]
    assert len(rows) == 9 and len(lines) == 2
    for line, own, end in zip(lines, (rows[:6], rows[6:]), (6, 9), strict=True):
        held = [row["surrogate_gain"] for row in own if row["surrogate_gain"] is not None]
        fitted = [row["surrogate_gain_in_sample"] for row in own if row["surrogate_gain_in_sample"] is not None]
        kls = [row["kl"]["exact"]["mean"] for row in own if row["kl"]]
        fresh = [row["success_rate"] for row in own if row["fresh_episodes"]]
        signals = [row["gradient_signal"] for row in own if row["gradient_signal"] is not None]
        wanted = [np.mean(held), np.std(held, ddof=1) / math.sqrt(len(held)), np.mean(fitted), np.mean(signals)]
        wanted += [np.mean(kls), np.median(kls), np.median([row["learning_rate"] for row in own]), np.mean(fresh)]
        count, minutes, clock, *found = (float(word) for word in line.split())
        assert count == end and minutes == pytest.approx(sum(spent[:end]) / 60, abs=0.051)
        beside = sum(sum(row["seconds"].values()) for row in rows[:end]) - sum(spent[:end])
        passed = rows[end - 1]["time"] - rows[0]["time"] + sum(rows[0]["seconds"].values()) - beside
        assert clock == pytest.approx(passed / 60, abs=0.051) and clock > minutes + 1
        assert found == pytest.approx(wanted, rel=6e-3), line
