"""Several runs beside each other: which of them differ in their seed alone, what the others differ in, and who is better."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from teamtr_lora.common.flat import flat
from teamtr_lora.common.paired import PairedTest, paired_test
from teamtr_lora.report.run_data import RunData

# 97.5% quantiles of Student's t with 1, 2, ... degrees of freedom: few seeds are usual, and the normal's 1.96 is then too small
T975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101,
    2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
ROUNDING = 1e-12  # what is closer together is equal: differences of equal values may be this far from 0
Evaluation = dict[str, Any]
ASIDE = {"seed", "output_dir", "tracking"}  # what does not make two runs different


@dataclass(frozen=True)
class Kind:
    """Runs of one recipe, seeds aside."""

    label: str
    runs: list[RunData]

    @property
    def by_seed(self) -> list[list[RunData]]:
        """Runs of one seed are no draws of their own: what they differ by is rounding."""
        return _by_seed(self.runs)


@dataclass(frozen=True)
class Difference:
    """`second` against `first` after their last evaluations, item by item; accuracies of several seeds are means."""

    first: str
    second: str
    test: PairedTest


def kinds_of(runs: Sequence[RunData]) -> list[Kind]:
    """In the order in which they were given, each named by what sets it apart from the others."""
    alike: dict[str, tuple[dict[str, Any], list[RunData]]] = {}
    for run in runs:
        settings = _settings(run)
        alike.setdefault(repr(sorted(settings.items())), (settings, []))[1].append(run)
    kinds = list(alike.values())
    varied = [key for key in kinds[0][0] if len({repr(settings.get(key)) for settings, _ in kinds}) > 1]
    return [Kind(_label(own, settings, varied), own) for settings, own in kinds]


def _label(runs: list[RunData], settings: dict[str, Any], varied: list[str]) -> str:
    if len(runs) == 1:
        return runs[0].name
    what = ", ".join(f"{key.rpartition('.')[2]} {settings.get(key)}" for key in varied[:2])
    return f"{what or runs[0].name} ({counted(len(runs), len(_by_seed(runs)))})"


def counted(runs: int, seeds: int) -> str:
    """In words: runs of one seed are not taken for several seeds."""
    if runs == seeds:
        return f"{seeds} seeds"
    return f"{runs} runs of {'one seed' if seeds == 1 else f'{seeds} seeds'}"


def _by_seed(runs: Sequence[RunData]) -> list[list[RunData]]:
    found: dict[int, list[RunData]] = {}
    for run in runs:
        found.setdefault(run.stored.recipe.seed, []).append(run)
    return list(found.values())


def _settings(run: RunData) -> dict[str, Any]:
    settings = flat(run.stored.recipe.model_dump(mode="json", exclude=ASIDE))
    return {key: value for key, value in settings.items() if value != {}}


def mean_and_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean of several seeds and half of its 95% interval; without spread, as of one seed, there is none."""
    if len(values) < 2 or math.isclose(min(values), max(values), abs_tol=ROUNDING):
        return fmean(values), None
    quantile = T975[len(values) - 2] if len(values) - 2 < len(T975) else 1.96
    return fmean(values), quantile * stdev(values) / math.sqrt(len(values))


def over_seeds(values_by_seed: Sequence[Sequence[float]]) -> tuple[float, float | None]:
    """`mean_and_interval` where a seed may have several runs: each seed counts once, by their mean."""
    return mean_and_interval([fmean(own) for own in values_by_seed if own])


def gain_of(run: RunData) -> PairedTest | None:
    """After the last evaluation against before training, item by item; None where the run did not measure both that way."""
    return _paired([run.ends[:1]], [run.ends[1:]]) if len(run.ends) == 2 else None


def differences(kinds: Sequence[Kind]) -> list[Difference]:
    """Every kind against the first one, where both were measured on the same items."""
    found = []
    for kind in kinds[1:]:
        test = _paired(*([[run.ends[-1] for run in own if run.ends] for own in one.by_seed] for one in (kinds[0], kind)))
        if test:
            found.append(Difference(kinds[0].label, kind.label, test))
    return found


def _paired(first: Sequence[Sequence[Evaluation]], second: Sequence[Sequence[Evaluation]]) -> PairedTest | None:
    """Of evaluations by seed. None where items differ or runs of an older version did not write them down."""
    sides = [[own for own in side if own] for side in (first, second)]
    digests = {evaluation.get("items_digest") for side in sides for own in side for evaluation in own}
    if not all(sides) or len(digests) != 1 or None in digests:
        return None
    return paired_test(*(_by_item([_by_item([e["by_item"] for e in own]) for own in side]) for side in sides))


def _by_item(rows: Sequence[Sequence[float]]) -> list[float]:
    """The mean of several, item by item."""
    return [fmean(item) for item in zip(*rows, strict=True)]
