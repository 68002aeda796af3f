"""Two evaluations on the same items: is one better, and how sure is that?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from teamtr_lora.common.errors import UserError
from teamtr_lora.evaluation.result import EvaluationResult
from teamtr_lora.evaluation.statistics import PairedTest, paired_test


@dataclass(frozen=True)
class Comparison:
    """Differences are second minus first."""

    first: str
    second: str
    items: int
    k: int
    temperatures: tuple[float, float]
    tests: dict[str, PairedTest]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(first: EvaluationResult, second: EvaluationResult, names: Sequence[str]) -> Comparison:
    """Paired by item: differences of the items' own means, so that hard and easy items cancel out."""
    k = first.evaluation.k
    if k != second.evaluation.k:
        raise UserError(f"{names[0]} was sampled {k} times an item and {names[1]} {second.evaluation.k} times; give --k")
    _check_items(first, second, names)
    measures = [name for name in first.rows[0].measures if name in second.rows[0].measures]
    tests = {
        name: paired_test([row.measures[name] for row in first.rows], [row.measures[name] for row in second.rows])
        for name in measures
    }
    temperatures = (first.evaluation.temperature, second.evaluation.temperature)
    return Comparison(names[0], names[1], items=len(first.rows), k=k, temperatures=temperatures, tests=tests)


def _check_items(first: EvaluationResult, second: EvaluationResult, names: Sequence[str]) -> None:
    for place, (a, b) in enumerate(zip(first.rows, second.rows, strict=False)):
        if (a.item, a.digest) != (b.item, b.digest):
            what = f"item {place} is {a.item!r} in {names[0]} and {b.item!r} in {names[1]}"
            what = what if a.item != b.item else f"item {a.item!r} is not the same problem in {names[0]} and {names[1]}"
            raise UserError(f"a paired test needs the same items, but {what}; evaluate both on one task and split")
    if len(first.rows) != len(second.rows):
        raise UserError(
            f"a paired test needs the same items, but {names[0]} has {len(first.rows)} and {names[1]} has {len(second.rows)}; "
            "give --limit"
        )
