"""Two evaluations on the same items: is one better, and how sure is that?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.paired import PairedTest, paired_test
from teamtr_lora.evaluation.result import EvaluationResult, Problems


@dataclass(frozen=True)
class Comparison:
    """Differences are second minus first."""

    first: str
    second: str
    items: int
    k: int
    temperatures: tuple[float, float]
    tests: dict[str, PairedTest]


def compare(first: EvaluationResult, second: EvaluationResult, names: Sequence[str]) -> Comparison:
    """Paired by item: differences of the items' own means, so that hard and easy items cancel out."""
    check_comparable(first.problems, second.problems, names)
    measures = [name for name in first.rows[0].measures if name in second.rows[0].measures]
    tests = {
        name: paired_test([row.measures[name] for row in first.rows], [row.measures[name] for row in second.rows])
        for name in measures
    }
    temperatures = (first.evaluation.temperature, second.evaluation.temperature)
    return Comparison(names[0], names[1], items=len(first.rows), k=first.evaluation.k, temperatures=temperatures, tests=tests)


def check_comparable(first: Problems, second: Problems, names: Sequence[str]) -> None:
    """Refuses two evaluations that are not of the same items, each sampled as often; done or still to be played."""
    if first.k != second.k:
        raise UserError(f"{names[0]} is sampled {first.k} times an item and {names[1]} {second.k} times; give --k")
    for place, ((a, problem), (b, other)) in enumerate(zip(first.items, second.items, strict=False)):
        if (a, problem) != (b, other):
            what = f"item {place} is {a!r} in {names[0]} and {b!r} in {names[1]}"
            what = what if a != b else f"item {a!r} is not the same problem in {names[0]} and {names[1]}"
            raise UserError(f"a paired test needs the same items, but {what}; evaluate both on one task and split")
    if len(first.items) != len(second.items):
        raise UserError(
            f"a paired test needs the same items, but {names[0]} has {len(first.items)} and {names[1]} has {len(second.items)}; "
            "give --limit"
        )
