"""What a run's steps gained on held-out episodes and on those that they were fitted to, in parts of so many updates.

    .venv/bin/python tools/gains.py RUN [RUN ...] [--updates 13]

Gains are of the surrogate, in units of the advantage, means over a part's updates with one standard error. A gain that is large
on the fitted episodes and small on held-out ones is noise that was learned by heart. signal: what share of a gradient's square
its micro-batches agree on. minutes: of rollouts and updates, until the end of the part; clock: since the first of them began,
with whatever came between, less phases that learning does not need; success: of the episodes that were sampled in it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, stdev

from budgets import BESIDE

from teamtr_lora.runs.metrics import UpdateRow, read_rows

COLUMNS = (
    "updates",
    "minutes",
    "clock",
    "held-out gain",
    "+-",
    "fitted gain",
    "signal",
    "KL mean",
    "KL median",
    "rate median",
    "success",
)


def part(rows: Sequence[UpdateRow]) -> list[float]:
    """The columns from the held-out gain on; nan where nothing was measured."""
    held = [row.surrogate_gain for row in rows if row.surrogate_gain is not None]
    fitted = [row.surrogate_gain_in_sample for row in rows if row.surrogate_gain_in_sample is not None]
    kls = [row.kl["exact"].mean for row in rows if row.kl and row.kl["exact"].mean is not None]
    fresh = [row.success_rate for row in rows if row.fresh_episodes]
    signals = [row.gradient_signal for row in rows if row.gradient_signal is not None]
    error = stdev(held) / math.sqrt(len(held)) if len(held) > 1 else math.nan
    rates = [row.learning_rate for row in rows]
    return [_mean(held), error, _mean(fitted), _mean(signals), _mean(kls), _median(kls), median(rates), _mean(fresh)]


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def _median(values: Sequence[float]) -> float:
    return median(values) if values else math.nan


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--updates", type=int, default=13, help="in a part")
    args = parser.parse_args(arguments)
    for run in args.runs:
        rows = [row for row in read_rows(run) if isinstance(row, UpdateRow)]
        print(f"{run}\n" + "".join(f"{name:>15}" for name in COLUMNS))
        begun = rows[0].time - sum(rows[0].seconds.values()) if rows else 0.0
        seconds = beside = 0.0
        for start in range(0, len(rows), args.updates):
            own = rows[start : start + args.updates]
            seconds += sum(value for row in own for phase, value in row.seconds.items() if phase not in BESIDE)
            beside += sum(row.seconds.get(phase, 0.0) for row in own for phase in BESIDE)
            clock = own[-1].time - begun - beside
            spent = f"{start + len(own):>15}{seconds / 60:>15.1f}{clock / 60:>15.1f}"
            print(spent + "".join(f"{value:>15.3g}" for value in part(own)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
