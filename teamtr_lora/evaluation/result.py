"""What `eval` reports: every measure with its interval over items, by category, and what it cost in tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from teamtr_lora.common.paired import bootstrap_intervals
from teamtr_lora.evaluation.evaluate import Evaluation, by_item, summarise_outcomes
from teamtr_lora.evaluation.outcome import Outcome
from teamtr_lora.evaluation.statistics import item_all_of_k, item_pass_at_k, k_values, majority, standard_error

# A column with more values than MOST_VALUES is no category; nor is one in which each of more than FEW_ITEMS items has its own.
MOST_VALUES, FEW_ITEMS = 40, 8


@dataclass(frozen=True)
class Estimate:
    """A mean over items; `low` and `high` are its 95% percentile bootstrap interval, items resampled whole."""

    value: float
    standard_error: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class ItemRow:
    """One item's own numbers; their means over items are the measures."""

    item: str
    digest: str
    samples: int
    successes: int
    measures: dict[str, float]
    categories: dict[str, str]


@dataclass(frozen=True)
class Problems:
    """What an evaluation is of: its items, each a name and a digest of the problem, and how often each is sampled."""

    k: int
    items: list[tuple[str, str]]


@dataclass(frozen=True)
class EvaluationResult:
    """What `eval` reports of one evaluation."""

    settings: dict[str, Any]
    evaluation: Evaluation
    measures: dict[str, Estimate]
    categories: dict[str, dict[str, tuple[int, dict[str, Estimate]]]]  # column -> value -> items, measures
    rows: list[ItemRow]
    folder: str = ""

    @property
    def problems(self) -> Problems:
        return Problems(self.evaluation.k, [(row.item, row.digest) for row in self.rows])

    def as_dict(self) -> dict[str, Any]:
        """As JSON data: the evaluation's own fields, and the others of this class with the rows as `by_item`."""
        data = asdict(self)
        categories = {
            column: {value: {"items": items, "measures": measures} for value, (items, measures) in values.items()}
            for column, values in data["categories"].items()
        }
        return data.pop("evaluation") | {"by_item": data.pop("rows")} | data | {"categories": categories}


def make_result(outcomes: Sequence[Outcome], settings: dict[str, Any], folder: str = "") -> EvaluationResult:
    k = int(settings["k"])
    rows = item_rows(outcomes, k)
    evaluation = summarise_outcomes(outcomes, split=settings["split"], k=k, temperature=settings["temperature"])
    return EvaluationResult(
        settings, evaluation, measures=estimates(rows), categories=by_category(rows), rows=rows, folder=folder
    )


def item_rows(outcomes: Sequence[Outcome], k: int) -> list[ItemRow]:
    voting = any(outcome.vote is not None for outcome in outcomes)  # a task without answers to count has no majority
    rows = []
    for group in by_item(outcomes):
        samples, successes = len(group), sum(o.success for o in group)
        measures = {f"avg@{k}": successes / samples}
        measures |= {f"pass@{j}": item_pass_at_k(successes, samples, j) for j in k_values(k)}
        measures |= {f"pass^{j}": item_all_of_k(successes, samples, j) for j in k_values(k)[1:]}
        if voting:
            measures[f"maj@{k}"] = majority([o.vote for o in group], [o.success for o in group])
        measures["mean reward"] = sum(o.reward for o in group) / samples
        measures["sampled tokens per answer"] = sum(o.sampled_tokens for o in group) / samples
        measures["prompt tokens per answer"] = sum(o.prompt_tokens for o in group) / samples
        first = group[0]
        rows.append(
            ItemRow(
                item=first.item,
                digest=first.digest,
                samples=samples,
                successes=successes,
                measures=measures,
                categories=first.categories,
            )
        )
    return rows


def estimates(rows: Sequence[ItemRow]) -> dict[str, Estimate]:
    names = list(rows[0].measures)
    values_I_M = np.array([[row.measures[name] for name in names] for row in rows])
    intervals = bootstrap_intervals(values_I_M)
    found = {}
    for column, (name, interval) in enumerate(zip(names, intervals, strict=True)):
        values = values_I_M[:, column].tolist()
        low, high = interval or (None, None)
        found[name] = Estimate(float(np.mean(values)), standard_error(values), low, high)
    return found


def by_category(rows: Sequence[ItemRow]) -> dict[str, dict[str, tuple[int, dict[str, Estimate]]]]:
    columns: dict[str, dict[str, list[ItemRow]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        for column, value in row.categories.items():
            columns[column][value].append(row)
    return {
        column: {value: (len(members), estimates(members)) for value, members in sorted(values.items(), key=_natural)}
        for column, values in columns.items()
        if len(values) <= MOST_VALUES and not len(values) == len(rows) > FEW_ITEMS
    }


def _natural(entry: tuple[str, Any]) -> tuple[bool, float, str]:
    """Numbers in their order, before words."""
    value = entry[0]
    return (not value.isdecimal(), float(value) if value.isdecimal() and len(value) < 16 else 0.0, value)
